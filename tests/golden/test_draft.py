"""Properties of the drafter that a trained pair would hide: small cache types, window, causality, block size."""
import pytest

from cases import DRAFT_TARGET, DRAFTS, REFERENCE, expected
from compare import assert_close, relative_error
from scalar_draft import Draft
from scalar_model import Target

SLIDING = "dense-a-draft-sliding"
# Positions around the window of 24: nothing outside it yet, exactly full, the first key left out, far beyond.
WINDOW_ANCHORS = (1, 8, 16, 22, 23, 24, 25, 40, 63, 64, 65, 149)
CACHE_LIMITS = {"bf16": 1.5e-2, "fp16": 2e-3, "e4m3": 6e-2}


def draft_logits(probe, golden, name, anchors, **options):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    return probe.arrays(ids, ("draft_logits",), model=golden / DRAFT_TARGET, draft=golden / name, anchors=anchors,
                        **options)["draft_logits"]


def scalar_logits(golden, name, anchors, **draft_options):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    target = Target(golden / DRAFT_TARGET)
    hidden = target.run(ids).hidden
    draft = Draft(golden / name, target, **draft_options)
    return [draft.logits(ids, hidden, anchor) for anchor in anchors]


@pytest.mark.parametrize("dtype", CACHE_LIMITS)
@pytest.mark.parametrize("name", DRAFTS)
def test_small_draft_caches_stay_near(probe, golden, name, dtype):
    exact = draft_logits(probe, golden, name, (40, 149), draft_dtype="f32", **REFERENCE.options)
    small = draft_logits(probe, golden, name, (40, 149), draft_dtype=dtype, **REFERENCE.options)
    assert_close(small, exact, CACHE_LIMITS[dtype], f"{dtype} draft cache")
    assert relative_error(small, exact) > 0, "the cache type had no effect"


@pytest.mark.parametrize("causal", ["yes", "no"])
def test_window_and_causality_follow_the_visibility_table(probe, golden, causal):
    got = draft_logits(probe, golden, SLIDING, WINDOW_ANCHORS, draft_causal=causal, **REFERENCE.options)
    want = scalar_logits(golden, SLIDING, WINDOW_ANCHORS, causal=causal)
    for anchor, rows, expected_rows in zip(WINDOW_ANCHORS, got, want, strict=True):
        assert_close(rows, expected_rows, 2e-5, f"causal {causal}, anchor {anchor}")


def test_causality_matters_in_sliding_layers_only(probe, golden):
    def both(name):
        return [draft_logits(probe, golden, name, (40,), draft_causal=causal, **REFERENCE.options)
                for causal in ("yes", "no")]

    assert relative_error(*both(SLIDING)) > 1e-2
    assert relative_error(*both("dense-a-draft")) == 0


def test_without_a_word_in_the_config_sliding_layers_are_causal(probe, golden):
    auto, causal = (draft_logits(probe, golden, SLIDING, (40,), draft_causal=c, **REFERENCE.options)
                    for c in ("auto", "yes"))
    assert relative_error(auto, causal) == 0


@pytest.mark.parametrize("block", [1, 3, 8])
def test_smaller_blocks_leave_out_the_last_rows(probe, golden, block):
    got = draft_logits(probe, golden, SLIDING, (40,), block_size=block, **REFERENCE.options)
    assert got.shape[1] == block
    assert_close(got[0], scalar_logits(golden, SLIDING, (40,), block=block)[0], 2e-5, f"block of {block}")
