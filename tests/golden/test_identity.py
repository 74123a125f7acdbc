"""Bit for bit the same, however the work is cut: prefill chunks, threads, verify blocks."""
import itertools

import numpy as np
import pytest

from cases import DRAFT_TARGET, FAST, MODES, expected

OUTPUTS = ("logits", "hidden")
DRAFT_OUTPUTS = ("logits", "hidden", "draft_logits")
ANCHORS = (1, 63, 64, 65, 149)
SPLITS = ([64, 86], [128, 22], [64, 64, 22])
N_LONG = 1200


def assert_same(a, b, names, what):
    for name in names:
        assert a.raw[name] == b.raw[name], f"{what}: {name} differs by up to {np.abs(a[name] - b[name]).max():.3e}"


def pieces(first, rest, n_tokens):
    """first, then chunks of `rest` up to n_tokens."""
    whole, remainder = divmod(n_tokens - first, rest)
    return [first] + [rest] * whole + ([remainder] if remainder else [])


@pytest.fixture(scope="module")
def ids(golden):
    return {name: expected(golden, name)["input_ids"] for name in ("dense-a", "moe-a", "fp8-a")}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_prefill_chunks_and_threads_change_nothing(probe, golden, ids, mode):
    options = dict(model=golden / DRAFT_TARGET, draft=golden / "dense-a-draft-sliding", anchors=ANCHORS, **mode.options)
    whole = probe.arrays(ids[DRAFT_TARGET], DRAFT_OUTPUTS, threads=1, **options)
    for split, threads in itertools.zip_longest(SPLITS, (1, 2, 3)):
        cut = probe.arrays(ids[DRAFT_TARGET], DRAFT_OUTPUTS, split=split, threads=threads, **options)
        assert_same(whole, cut, DRAFT_OUTPUTS, f"split {split}, {threads} threads")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ["moe-a", "fp8-a"])
def test_prefill_chunks_and_threads_change_nothing_for_other_weights(probe, golden, ids, name, mode):
    options = dict(model=golden / name, **mode.options)
    whole = probe.arrays(ids[name], OUTPUTS, threads=1, **options)
    cut = probe.arrays(ids[name], OUTPUTS, split=[64, 36], threads=3, **options)
    assert_same(whole, cut, OUTPUTS, "split 64, 36; 3 threads")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ["dense-a", "moe-a", "fp8-a"])
def test_verify_blocks_equal_one_token_at_a_time(probe, golden, ids, name, mode):
    """Row by row in the verify path, in blocks, and as one-token prefill chunks."""
    options = dict(model=golden / name, threads=2, **mode.options)
    n_tokens = len(ids[name])
    single = probe.arrays(ids[name], OUTPUTS, split=pieces(64, 1, n_tokens), **options)
    for rows in (1, 7, 16):
        blocks = probe.arrays(ids[name], OUTPUTS, split=[64], verify=rows, **options)
        assert_same(single, blocks, OUTPUTS, f"verify blocks of {rows}")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drafts_after_verify_blocks_are_the_same(probe, golden, ids, mode):
    """The draft context written by commits equals the one written by prefill."""
    options = dict(model=golden / DRAFT_TARGET, draft=golden / "dense-a-draft-unsorted-bias", anchors=ANCHORS,
                   **mode.options)
    prefill = probe.arrays(ids[DRAFT_TARGET], ("draft_logits",), **options)
    blocks = probe.arrays(ids[DRAFT_TARGET], ("draft_logits",), split=[64], verify=16, **options)
    assert_same(prefill, blocks, ("draft_logits",), "draft context of verify blocks")


@pytest.mark.parametrize("mode", FAST, ids=str)
def test_chunks_change_nothing_across_attention_spans(probe, golden, mode):
    long_ids = np.random.default_rng(2).integers(2, 512, N_LONG)
    options = dict(model=golden / "dense-a", **mode.options)
    whole = probe.arrays(long_ids, OUTPUTS, threads=1, **options)
    cut = probe.arrays(long_ids, OUTPUTS, split=pieces(960, 64, N_LONG), threads=2, **options)
    assert_same(whole, cut, OUTPUTS, "chunks of 64 after 960")
