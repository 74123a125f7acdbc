"""The program against the reference implementation's outputs."""
import pytest

from cases import DRAFT_TARGET, DRAFTS, FAST, FAST_LIMIT, REFERENCE, TARGETS, draft_blocks, expected
from compare import assert_close

REFERENCE_LIMIT = 2e-5


@pytest.mark.parametrize("name", TARGETS)
def test_reference_numerics_agree(probe, golden, name):
    want = expected(golden, name)
    got = probe.arrays(want["input_ids"], ("logits", "hidden"), model=golden / name, **REFERENCE.options)
    assert_close(got["logits"], want["logits"], REFERENCE_LIMIT, "logits")
    assert_close(got["hidden"], want["hidden_states"], REFERENCE_LIMIT, "hidden states")


def run_draft(probe, golden, name, anchors, mode):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    return probe.arrays(ids, ("draft_logits",), model=golden / DRAFT_TARGET, draft=golden / name, anchors=anchors,
                        **mode.options)["draft_logits"]


@pytest.mark.parametrize("name", DRAFTS)
def test_reference_numerics_draft_agrees(probe, golden, name):
    blocks = draft_blocks(golden, name)
    anchors = sorted(blocks)
    got = run_draft(probe, golden, name, anchors, REFERENCE)
    for anchor, rows in zip(anchors, got, strict=True):
        assert_close(rows, blocks[anchor], REFERENCE_LIMIT, f"draft logits at {anchor}")


@pytest.mark.parametrize("mode", FAST, ids=str)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "moe-a"])
def test_fast_numerics_stay_near(probe, golden, name, mode):
    want = expected(golden, name)
    got = probe.arrays(want["input_ids"], ("logits", "hidden"), model=golden / name, **mode.options)
    assert_close(got["logits"], want["logits"], FAST_LIMIT, "logits")
    assert_close(got["hidden"], want["hidden_states"], FAST_LIMIT, "hidden states")


@pytest.mark.parametrize("mode", FAST, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_fast_numerics_draft_stays_near(probe, golden, name, mode):
    blocks = draft_blocks(golden, name)
    anchors = sorted(blocks)
    got = run_draft(probe, golden, name, anchors, mode)
    for anchor, rows in zip(anchors, got, strict=True):
        assert_close(rows, blocks[anchor], FAST_LIMIT, f"draft logits at {anchor}")
