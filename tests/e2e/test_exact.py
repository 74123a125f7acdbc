"""The same request gives the same tokens, whatever else goes on and however it is computed: architecture E1, E3, E5.

By default each prompt gets some tokens beyond its end; with --long 256 of them, and the slow reference numerics too.
"""
import random

import pytest

from ask import accept_length, ask_all, ask_one_by_one, check_answer, ids_of, wait_until_all_is_home
from conftest import ROOT
from tiny_pair import N_TOKENS, TinyPair, device_bytes, is_decided

TINY = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
WIDE = {"kv.device_bytes": "1GiB"}  # 32 seqs side by side: a quarter of it holds their states
ACCEPT_LENGTH_MIN = 4.9
HITS = 'spillway_prefix_lookups_total{outcome="hit"}'


def requests(n_tokens, **params):
    return [{"prompt_ids": ids, "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True, **params}
            for ids in TINY.prompts]


@pytest.fixture(scope="module")
def n_tokens(long):
    return 256 if long else 16


@pytest.fixture(scope="module")
def plain(kept_daemon, n_tokens):
    """What a daemon without drafter writes for one request after the other, each prefilled from its first token."""
    one = kept_daemon(**{"draft.path": ""})
    with one.connect() as client:
        assert client.call("model.info")["draft"] is None
        ids = ids_of(ask_one_by_one(client, requests(n_tokens, cache="bypass")))
    one.stop()
    return ids


def test_the_drafter_changes_nothing(daemon, plain, n_tokens):
    with daemon(**{"draft.fallback": "false"}).connect() as client:
        drafted = ask_one_by_one(client, requests(n_tokens))
        assert ids_of(drafted) == plain
        assert ids_of(ask_all(client, requests(n_tokens, speculate=False, cache="bypass"))) == plain
    assert all(answer["usage"]["draft"]["accepted"] > 0 for answer in drafted)


def test_neighbours_change_nothing(daemon, plain, n_tokens):
    """Each prompt runs among 31 others, which sample, are biased, do without drafts, and come and go."""
    others = [{"prompt_ids": TINY.prompts[i % 7], "temperature": 1.5, "seed": i, "max_tokens": n_tokens + 9 * i,
               "ignore_eos": True, "speculate": i % 2 == 0, "frequency_penalty": 0.1 * i} for i in range(8)]
    one = daemon(**WIDE)
    with one.connect() as client, one.connect() as watcher:
        crowd = [client.generate(stream=False, return_ids=True, **other) for other in others]
        generations = [client.generate(stream=False, return_ids=True, **request) for request in requests(n_tokens)]
        n_running = 0
        while n_running < 32 and not generations[-1]._request.done:
            n_running = max(n_running, watcher.call("server.stats")["requests"]["running"])
        assert ids_of([generation.result() for generation in generations]) == plain
        for generation in crowd:
            generation.result()
    assert n_running == 32


@pytest.mark.parametrize("chunk", (64, 128, 512))
def test_prefill_chunks_change_nothing(daemon, plain, n_tokens, chunk):
    with daemon(**WIDE, **{"sched.prefill_chunk": chunk}).connect() as client:
        assert ids_of(ask_all(client, requests(n_tokens, cache="bypass"))) == plain


def test_the_cache_changes_nothing(daemon, plain, n_tokens):
    """First without what others left, then from the device, then with drafts whose context comes from there."""
    with daemon(**WIDE).connect() as client:
        for cache in ("bypass", "use", "use"):
            answers = ask_all(client, requests(n_tokens, cache=cache))
            assert ids_of(answers) == plain, cache
        for ids, answer in zip(TINY.prompts, answers):
            assert answer["usage"]["cached"]["device"] == (len(ids) - 1) // 64 * 64
            assert answer["usage"]["recomputed"] == 0
        assert ids_of(ask_all(client, requests(n_tokens, speculate=False))) == plain


def test_penalties_bias_and_logprobs_are_the_same_with_drafts_and_in_a_batch(daemon, n_tokens):
    shapes = [{"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.4},
              {"logit_bias": {str(TINY.cases[0]["output_ids"][i]): -100.0 for i in range(3)}, "logprobs": 5},
              {"logprobs": 20, "frequency_penalty": -0.5}, {"logprobs": 0, "temperature": 0.8, "seed": 5}]
    asked = [{**request, **shapes[i % len(shapes)]} for i, request in enumerate(requests(n_tokens))]

    with daemon(**WIDE).connect() as client:
        together = ask_all(client, asked)
        plain = ask_all(client, [{**request, "speculate": False, "cache": "bypass"} for request in asked])
        alone = ask_one_by_one(client, asked)
    for i, answers in enumerate(zip(together, plain, alone)):
        assert answers[0]["ids"] == answers[1]["ids"] == answers[2]["ids"], asked[i]
        for other in answers[1:]:
            assert other.get("logprobs") == answers[0].get("logprobs"), asked[i]
    assert sum(answer["usage"]["draft"]["accepted"] for answer in together) > 0


def test_reference_numerics_write_what_the_reference_implementation_wrote(daemon, long, backend):
    if backend != "cpu":
        pytest.skip(f"{backend} has one numeric mode")
    cases = TINY.cases if long else [case for case in TINY.cases if is_decided(case)][5:7]
    with daemon(**{"model.numeric": "reference", "draft.fallback": "false"}).connect() as client:
        answers = ask_all(client, [{"prompt_ids": case["prompt_ids"], "temperature": 0, "max_tokens": N_TOKENS}
                                   for case in cases])
    for case, answer in zip(cases, answers):
        if is_decided(case):
            assert answer["ids"] == case["output_ids"], case["prompt"]
            assert answer["usage"]["draft"]["steps"] == len(case["steps"])
    if long:
        print(f"reference numerics: accept length {accept_length(answers):.2f}")
        assert accept_length(answers) >= ACCEPT_LENGTH_MIN


def test_fast_numerics_accept_as_many_drafts(daemon):
    asked = [{"prompt_ids": ids, "temperature": 0, "max_tokens": N_TOKENS} for ids in TINY.prompts]
    with daemon(**{"draft.fallback": "false"}).connect() as client:
        answers = ask_all(client, asked)
    print(f"fast numerics: accept length {accept_length(answers):.2f}")
    assert accept_length(answers) >= ACCEPT_LENGTH_MIN


@pytest.mark.parametrize("params", ({}, {"speculate": False}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3}),
                         ids=("drafts", "plain", "sampled"))
def test_who_is_preempted_goes_on_with_the_same_tokens(daemon, long, backend, params):
    """Seqs that come to need 8 pages each share 15: two are admitted, and pages run out while they decode. On a card one
    may have ended before the next has come to its last pages, so there it takes more of them."""
    small = {"kv.device_bytes": device_bytes(25, 2, backend), "kv.dtype": "f32", "kv.draft_dtype": "f32",
             "draft.fallback": "false"}
    asked = [{"prompt_ids": TINY.prompts[9][i:] + TINY.prompts[9][:i], "temperature": 0, "ignore_eos": True,
              "max_tokens": 180, **params} for i in range(12 if long or backend != "cpu" else 2)]
    one = daemon(**small)
    with one.connect() as client:
        alone = ask_one_by_one(client, [{**request, "cache": "bypass"} for request in asked])
        assert one.metrics()["spillway_preemptions_total"] == 0
        together = ask_all(client, asked)
    assert ids_of(together) == ids_of(alone)
    metrics = one.metrics()
    print(f"{metrics['spillway_preemptions_total']:.0f} preemptions")
    assert metrics["spillway_preemptions_total"] > 0
    wait_until_all_is_home(one)


def any_request(rng):
    """Prompts that share beginnings, of all lengths; every parameter that has a say in tokens."""
    begin = TINY.prompts[rng.choice((2, 4, 9))]
    params = {"prompt_ids": begin[:rng.randrange(1, len(begin))] + rng.choice(TINY.prompts)[:rng.randrange(200)],
              "max_tokens": rng.choice((1, 2, 17, 40, rng.randrange(200, 320))), "ignore_eos": rng.random() < 0.7,
              "speculate": rng.random() < 0.8, "temperature": rng.choice((0, 0, 0.7, 1.2)), "seed": rng.randrange(99),
              "cache": rng.choice(("use", "use", "use", "no_store", "bypass")), "priority": rng.randrange(-2, 3)}
    if rng.random() < 0.3:
        params |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
    if rng.random() < 0.2:
        params |= {"logprobs": rng.randrange(4)}
    if rng.random() < 0.2:
        params |= {"stop_ids": rng.sample(range(4096), 5), "stop": ["and", " 1"]}
    return params


def same_answer(a, b):
    return all(a.get(key) == b.get(key) for key in ("ids", "text", "finish_reason", "stop_match", "logprobs"))


def test_a_crowd_on_a_small_device_gets_what_each_gets_alone(daemon, long, backend):
    """Hits, branches, evictions, preemptions, priorities and cancels all at once."""
    seed = 4
    rng = random.Random(seed)
    asked = [any_request(rng) for _ in range(200 if long else 8)]
    settings = {"kv.dtype": "f32", "kv.draft_dtype": "f32"}
    with daemon(**settings, **{"draft.path": "", "kv.device_bytes": "256MiB"}).connect() as client:
        alone = ask_one_by_one(client, [{**request, "cache": "bypass"} for request in asked])
    small = daemon(**settings, **{"kv.device_bytes": device_bytes(25, 2, backend), "sched.prefill_chunk": 128})
    with small.connect() as client, small.connect() as other:
        for begin in range(0, len(asked), 48):
            part = asked[begin:begin + 48]
            crowd = [client.generate(stream=False, return_ids=True, **request) for request in part]
            cancelled = [other.generate(**any_request(rng)) for _ in range(len(part) // 4)]
            for i, generation in enumerate(crowd):
                answer = generation.result()
                if i % 4 == 3 and cancelled:
                    cancelled.pop().cancel()
                check_answer(answer, asked[begin + i])
                assert same_answer(answer, alone[begin + i]), f"seed {seed}, request {begin + i}: {asked[begin + i]}"
            for generation in cancelled:
                generation.result()
    metrics = small.metrics()
    wait_until_all_is_home(small)
    print(f"{len(asked)} requests, {metrics['spillway_preemptions_total']:.0f} preemptions, "
          f"{metrics[HITS]:.0f} hits")
