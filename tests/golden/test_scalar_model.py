"""The scalar model reproduces the reference implementation; only this makes it a judge of the other tests."""
import numpy as np
import pytest

from cases import DRAFT_TARGET, DRAFTS, TARGETS, draft_blocks, expected
from compare import assert_close
from scalar_draft import Draft
from scalar_model import Target
from tiny_pair import is_decided

LIMIT = 2e-5
# The third prompt and its answer are longer than the window of the sliding layers.
TINY_CASES = (0, 2, 8, 16)


@pytest.mark.parametrize("name", TARGETS)
def test_target_agrees_with_reference(golden, name):
    want = expected(golden, name)
    got = Target(golden / name).run(want["input_ids"])
    assert_close(got.logits, want["logits"], LIMIT, "logits")
    assert_close(got.hidden[:-1], want["hidden_states"], LIMIT, "hidden states")


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_agrees_with_reference(golden, name):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    target = Target(golden / DRAFT_TARGET)
    hidden = target.run(ids).hidden
    draft = Draft(golden / name, target)
    for anchor, want in draft_blocks(golden, name).items():
        assert_close(draft.logits(ids, hidden, anchor), want, LIMIT, f"draft logits at {anchor}")


@pytest.mark.parametrize("index", TINY_CASES)
def test_trained_pair_writes_and_drafts_what_the_reference_did(tiny, index):
    case = tiny.cases[index]
    assert is_decided(case)
    target = Target(tiny.target)
    draft = Draft(tiny.draft, target)
    ids = case["prompt_ids"] + case["output_ids"]
    done = target.run(np.array(ids))
    assert done.logits[len(case["prompt_ids"]) - 1:-1].argmax(1).tolist() == case["output_ids"]
    for step in case["steps"]:
        rows = draft.logits(ids, done.hidden, step["position"])
        assert rows[1:].argmax(1).tolist() == step["draft"]
