"""The trained pair in reference numerics: every token, every draft, every accept count of the reference run."""
import json

import pytest

from cases import REFERENCE
from tiny_pair import N_TOKENS, is_decided

ACCEPT_LENGTH_MIN = 4.9
# A block is cut where no more tokens are wanted. One block beyond the reference shows its last drafts whole.
N_BEYOND = 16


@pytest.fixture(scope="module")
def results(probe, tiny):
    """Every case as the reference ran it: at most N_TOKENS, and the steps that begin before the last of them."""
    raw = probe.generate(tiny.prompts, N_TOKENS + N_BEYOND, model=tiny.target, draft=tiny.draft, **REFERENCE.options)
    assert len(raw) == len(tiny.cases)
    return [cut(result, len(prompt)) for result, prompt in zip(raw, tiny.prompts)]


def cut(result, n_prompt):
    ids = result["ids"][:N_TOKENS]
    end = n_prompt + len(ids)
    steps = [{**step, "accepted": min(step["accepted"], end - step["position"] - 1)}
             for step in result["steps"] if step["position"] < end - 1]
    return {"ids": ids, "steps": steps, "text": result["text"]}


def test_tokens_are_those_of_the_reference(tiny, results):
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            assert result["ids"] == case["output_ids"], case["prompt"]


def test_every_draft_and_accept_count_is_that_of_the_reference(tiny, results):
    compared = 0
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            assert result["steps"] == case["steps"], case["prompt"]
            compared += len(case["steps"])
    print(f"{compared} steps compared")
    assert compared > 150


def test_accept_length_is_that_of_the_reference(results):
    """Tokens committed by verify passes per pass; the first token of an answer comes from prefill."""
    committed = sum(len(result["ids"]) - 1 for result in results)
    passes = sum(len(result["steps"]) for result in results)
    print(f"accept length {committed / passes:.2f} ({committed} / {passes})")
    assert committed / passes >= ACCEPT_LENGTH_MIN


def test_text_is_that_of_the_reference(tiny, results):
    """The reference text shows the stop marker, ours does not; where the length ended it, ours goes on."""
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            text = case["text"].removesuffix("<|im_end|>")
            assert result["text"] == text or len(case["output_ids"]) == N_TOKENS and result["text"].startswith(text)


def test_tokenizer_cuts_the_prompts_alike(probe, tiny):
    for case in tiny.cases:
        out = probe.text(model=tiny.target, text=case["prompt"], markup=True, tokenize=True)
        assert json.loads(out) == case["prompt_ids"], case["prompt"]
