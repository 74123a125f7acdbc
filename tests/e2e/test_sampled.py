"""Sampling: a seed repeats its answer exactly, and drafting leaves the distribution as it is."""
import collections
import math

import pytest

from ask import ask_all, ask_one_by_one, ids_of
from chi_square import p_of, p_of_fit, p_of_same
from conftest import ROOT
from tiny_pair import TinyPair

TINY = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
OPEN_END = TINY.prompts[25]  # "The sea was calm and the captain said": many ways to go on
WIDE = {"kv.device_bytes": "1GiB", "draft.fallback": "false"}
P_MIN = 1e-4  # the seeds are fixed: it fails always or never


def test_a_seed_repeats_its_answer_alone_in_a_batch_and_without_drafts(daemon, long):
    shapes = [{"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {"temperature": 0.7}, {"temperature": 1.4, "min_p": 0.05},
              {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5}, {"temperature": 0.9, "top_p": 0.6, "logprobs": 3}]
    asked = [{"prompt_ids": ids, "seed": 2**63 + 7 * i, "max_tokens": 200 if long else 20, "ignore_eos": True,
              **shapes[i % len(shapes)]} for i, ids in enumerate(TINY.prompts)]

    with daemon(**WIDE).connect() as client:
        together = ask_all(client, asked)
        backwards = ask_all(client, asked[::-1])[::-1]
        plain = ask_all(client, [{**request, "speculate": False, "cache": "bypass"} for request in asked])
        alone = ask_one_by_one(client, asked)
    for i, answers in enumerate(zip(together, backwards, plain, alone)):
        for other in answers[1:]:
            assert other["ids"] == answers[0]["ids"], asked[i]
            assert other["text"] == answers[0]["text"]
            assert other.get("logprobs") == answers[0].get("logprobs"), asked[i]
    assert sum(answer["usage"]["draft"]["accepted"] for answer in together) > 0


def test_without_a_seed_answers_differ(daemon):
    with daemon().connect() as client:
        a, b = ask_all(client, [{"prompt_ids": OPEN_END, "temperature": 1.0, "max_tokens": 16}] * 2)
    assert a["ids"] != b["ids"]


@pytest.mark.parametrize("chi_square, n_free, p", ((3.8415, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001),
                                                   (124.342, 100, 0.05), (2.0, 2, math.exp(-1))))
def test_the_test_knows_the_tables(chi_square, n_free, p):
    assert p_of(chi_square, n_free) == pytest.approx(p, rel=1e-3)


def sample(client, seeds, n_tokens, **params):
    return ask_all(client, [{"prompt_ids": OPEN_END, "seed": seed, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                             "max_tokens": n_tokens, "ignore_eos": True, **params} for seed in seeds])


def probabilities(client, prompt_ids):
    """Of the likeliest tokens that may follow."""
    answer = ask_all(client, [{"prompt_ids": prompt_ids, "temperature": 0, "max_tokens": 1, "logprobs": 20}])[0]
    return {entry["id"]: math.exp(entry["logprob"]) for entry in answer["logprobs"][0]["top"]}


def test_drafting_leaves_the_distribution_as_it_is(daemon, long):
    """The first token comes from the prompt's own pass, the others from verify passes over drafts."""
    n, n_tokens = (6000, 5) if long else (400, 3)
    with daemon(**WIDE).connect() as client:
        drafted = sample(client, range(n), n_tokens)
        plain = sample(client, range(n, 2 * n), n_tokens, speculate=False)
        first = collections.Counter(answer["ids"][0] for answer in drafted)
        p_first = p_of_fit(first, probabilities(client, OPEN_END))
        begin = first.most_common(1)[0][0]
        p_second = p_of_fit(collections.Counter(answer["ids"][1] for answer in drafted if answer["ids"][0] == begin),
                            probabilities(client, OPEN_END + [begin]))
    p_same = [p_of_same(*(collections.Counter(answer["ids"][i] for answer in answers) for answers in (drafted, plain)))
              for i in range(n_tokens)]
    n_proposed, n_accepted = (sum(answer["usage"]["draft"][key] for answer in drafted)
                              for key in ("proposed", "accepted"))
    print(f"{n} seeds: p of the model's own distribution {p_first:.3f} {p_second:.3f}, of plain sampling "
          f"{' '.join(f'{p:.3f}' for p in p_same)}; {n_accepted} of {n_proposed} drafts accepted")
    assert 0 < n_accepted < n_proposed
    assert min(p_first, p_second, *p_same) > P_MIN
