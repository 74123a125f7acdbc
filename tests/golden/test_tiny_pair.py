"""The trained pair in reference numerics: every token, every draft, every accept count of the reference run."""
import json

import pytest

from cases import REFERENCE
from tiny_pair import N_TOKENS, is_decided

ACCEPT_LENGTH_MIN = 4.9
STOP_ID = 4088


@pytest.fixture(scope="module")
def results(probe, tiny):
    return probe.generate(tiny.prompts, N_TOKENS, model=tiny.target, draft=tiny.draft, **REFERENCE.options)


def expected_steps(case):
    """The reference counts every draft that equals the text. We verify no more rows than tokens are wanted, so where the
    length ends the text its last token is the verify pass's own choice, never an accepted draft."""
    end = len(case["prompt_ids"]) + len(case["output_ids"])
    by_length = case["output_ids"][-1] != STOP_ID
    steps = []
    for step in case["steps"]:
        accepted = step["accepted"]
        if by_length and step["position"] + accepted + 1 == end:
            accepted -= 1
        steps.append({**step, "accepted": accepted})
    return steps


def test_tokens_are_those_of_the_reference(tiny, results):
    assert len(results) == len(tiny.cases)
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            assert result["ids"] == case["output_ids"], case["prompt"]


def test_every_draft_and_accept_count_is_that_of_the_reference(tiny, results):
    compared = 0
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            assert result["steps"] == expected_steps(case), case["prompt"]
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
    """The reference text shows the stop marker, ours does not."""
    for case, result in zip(tiny.cases, results):
        if is_decided(case):
            assert result["text"] == case["text"].removesuffix("<|im_end|>")


def test_tokenizer_cuts_the_prompts_alike(probe, tiny):
    for case in tiny.cases:
        out = probe.text(model=tiny.target, text=case["prompt"], markup=True, tokenize=True)
        assert json.loads(out) == case["prompt_ids"], case["prompt"]
