"""The program against the scalar model where rounding decides: BF16 mode, and caches of fewer bits.

Both compute in double and round at the same named points, so they agree far below one rounding step. One value that is
rounded at another place moves whole rows by more than 1e-4.
"""
import numpy as np
import pytest

from cases import BF16, DRAFT_TARGET, DRAFTS, REFERENCE, TARGETS, expected
from compare import assert_close
from scalar_draft import Draft
from scalar_model import Target

LIMIT = 1e-5
REFERENCE_LIMIT = 2e-8
ANCHORS = (1, 40, 64, 149)
# Longer than one attention span, so that the merging of spans takes part.
N_LONG = 1100


def compare_target(probe, folder, ids, mode, kv_dtype):
    got = probe.arrays(ids, ("logits", "hidden"), model=folder, kv_dtype=kv_dtype, **mode.options)
    want = Target(folder, mode.name, kv_dtype).run(ids)
    assert_close(got["hidden"], want.hidden[:-1], LIMIT, "hidden states")
    assert_close(got["logits"], want.logits, LIMIT, "logits")


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", TARGETS)
def test_bf16_mode_rounds_at_the_named_points(probe, golden, name, kv_dtype):
    compare_target(probe, golden / name, expected(golden, name)["input_ids"], BF16, kv_dtype)


@pytest.mark.parametrize("name", TARGETS)
def test_reference_rounds_nothing_inside_an_op(probe, golden, name):
    """Where the model stores no float32 the program keeps a double, down to the shares of the experts: a float32 there
    is an error of 1e-7 here, and a flipped rounding step of whole rows in BF16 mode."""
    ids = expected(golden, name)["input_ids"]
    got = probe.arrays(ids, ("logits",), model=golden / name, **REFERENCE.options)["logits"]
    assert_close(got, Target(golden / name).run(ids).logits, REFERENCE_LIMIT, "logits")


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "e4m3"])
def test_cache_types_round_as_their_formats_say(probe, golden, kv_dtype):
    compare_target(probe, golden / "dense-a", expected(golden, "dense-a")["input_ids"], REFERENCE, kv_dtype)


@pytest.mark.parametrize("mode", [REFERENCE, BF16], ids=str)
def test_spans_merge_to_one_softmax(probe, golden, mode):
    ids = np.random.default_rng(1).integers(2, 512, N_LONG)
    compare_target(probe, golden / "dense-a", ids, mode, "f32")


@pytest.mark.parametrize("draft_dtype", ["f32", "bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("mode", [REFERENCE, BF16], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_draft_rounds_at_the_named_points(probe, golden, name, mode, draft_dtype):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    got = probe.arrays(ids, ("draft_logits",), model=golden / DRAFT_TARGET, draft=golden / name, anchors=ANCHORS,
                       kv_dtype="f32", draft_dtype=draft_dtype, **mode.options)["draft_logits"]
    target = Target(golden / DRAFT_TARGET, mode.name, "f32")
    draft = Draft(golden / name, target, mode.name, draft_dtype)
    hidden = target.run(ids).hidden
    for anchor, rows in zip(ANCHORS, got, strict=True):
        assert_close(rows, draft.logits(ids, hidden, anchor), LIMIT, f"draft logits at {anchor}")
