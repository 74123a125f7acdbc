"""The CUDA backend: near the oracle with its rounding points, near the references, and bit for bit the same however the work
is cut. Exit 77 where there is no card or no CUDA in the build."""
import numpy as np
import pytest

from cases import BF16, DRAFT_TARGET, DRAFTS, FAST_LIMIT, TARGETS, Mode, draft_blocks, expected
from compare import assert_close
from scalar_model import Target
from test_identity import ANCHORS, DRAFT_OUTPUTS, OUTPUTS, SPLITS, assert_same, pieces
from test_routing import same_experts

CUDA = Mode("cuda", {"backend": "cuda"})
# A sum in float32 next to a rounding boundary falls to the other side now and then; from there on that row is another one
# by whole rounding steps. So it is the rows in the middle that are held to the oracle, and all of them to a wider limit.
ORACLE_LIMIT = 3e-3
ORACLE_LIMIT_ALL = 1.2e-2
MARGIN_MIN = 0.2  # below this gap of the two best logits bf16 and a float32 reference may choose differently
N_GENERATE = 256


@pytest.fixture(scope="module", autouse=True)
def card(probe, golden):
    code, _, err = probe.run(model=golden / "dense-a", ids=golden / "one-id.json", generate=1, **CUDA.options)
    if code == 77 and "cannot be opened" in err:
        pytest.exit("no card, or no CUDA in the build", returncode=77)


def assert_near_oracle(got, oracle, what):
    got, oracle = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (got, oracle))
    rows = np.linalg.norm(got - oracle, axis=1) / np.linalg.norm(oracle, axis=1)
    print(f"{what}: {(rows == 0).sum()} of {len(rows)} rows equal, median {np.median(rows):.2e} (limit {ORACLE_LIMIT:.0e})")
    assert np.median(rows) <= ORACLE_LIMIT, what
    assert_close(got, oracle, ORACLE_LIMIT_ALL, what)


@pytest.mark.parametrize("name", ["dense-a", "fp8-a"])
def test_target_is_near_the_reference(probe, golden, name):
    want = expected(golden, name)
    got = probe.arrays(want["input_ids"], OUTPUTS, model=golden / name, **CUDA.options)
    assert_close(got["logits"], want["logits"], FAST_LIMIT, "logits")
    assert_close(got["hidden"], want["hidden_states"], FAST_LIMIT, "hidden states")


def test_target_is_near_the_oracle(probe, golden):
    """Not fp8-a: the oracle multiplies by unrounded dequantised weights, this backend by their bf16, as `fast` does."""
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    got = probe.arrays(ids, OUTPUTS, model=golden / DRAFT_TARGET, **CUDA.options)
    oracle = probe.arrays(ids, OUTPUTS, model=golden / DRAFT_TARGET, **BF16.options)
    assert_near_oracle(got["logits"], oracle["logits"], "logits")
    assert_near_oracle(got["hidden"], oracle["hidden"], "hidden states")


def test_experts_are_near_the_model_given_their_choices(probe, golden):
    ids = expected(golden, "moe-a")["input_ids"]
    got = probe.arrays(ids, ("logits", "hidden", "routing"), model=golden / "moe-a", **CUDA.options)
    want = Target(golden / "moe-a").run(ids, forced=got["routing"])
    flips = (~same_experts(got["routing"], want.routing)).sum()
    print(f"{flips} of {want.routing[..., 0].size} choices differ from the reference's")
    assert_close(got["logits"], want.logits, FAST_LIMIT, "logits")
    assert_close(got["hidden"], want.hidden[:-1], FAST_LIMIT, "hidden states")


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_is_near_the_oracle_and_the_reference(probe, golden, name):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    blocks = draft_blocks(golden, name)
    anchors = sorted(blocks)
    options = dict(model=golden / DRAFT_TARGET, draft=golden / name, anchors=anchors)
    got = probe.arrays(ids, ("draft_logits",), **options, **CUDA.options)["draft_logits"]
    oracle = probe.arrays(ids, ("draft_logits",), **options, **BF16.options)["draft_logits"]
    for anchor, rows in zip(anchors, got, strict=True):
        assert_close(rows, blocks[anchor], FAST_LIMIT, f"draft logits at {anchor}")
    assert_close(got, oracle, ORACLE_LIMIT_ALL, "draft logits, oracle")


def test_prefill_chunks_change_nothing(probe, golden):
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    options = dict(model=golden / DRAFT_TARGET, draft=golden / "dense-a-draft-sliding", anchors=ANCHORS, **CUDA.options)
    whole = probe.arrays(ids, DRAFT_OUTPUTS, **options)
    for split in SPLITS:
        assert_same(whole, probe.arrays(ids, DRAFT_OUTPUTS, split=split, **options), DRAFT_OUTPUTS, f"split {split}")


@pytest.mark.parametrize("name", TARGETS)
def test_verify_blocks_equal_one_token_at_a_time(probe, golden, name):
    ids = expected(golden, name)["input_ids"]
    options = dict(model=golden / name, **CUDA.options)
    single = probe.arrays(ids, OUTPUTS, split=pieces(64, 1, len(ids)), **options)
    assert_same(single, probe.arrays(ids, OUTPUTS, **options), OUTPUTS, "whole")
    for begin, rows in ((64, 1), (64, 7), (64, 16), (37, 16)):
        blocks = probe.arrays(ids, OUTPUTS, split=[begin], verify=rows, **options)
        assert_same(single, blocks, OUTPUTS, f"blocks of {rows} from {begin} on")


def test_drafts_after_verify_blocks_are_the_same(probe, golden):
    """The draft context written by commits equals the one written by prefill."""
    ids = expected(golden, DRAFT_TARGET)["input_ids"]
    options = dict(model=golden / DRAFT_TARGET, draft=golden / "dense-a-draft-unsorted-bias", anchors=ANCHORS,
                   **CUDA.options)
    prefill = probe.arrays(ids, ("draft_logits",), **options)
    blocks = probe.arrays(ids, ("draft_logits",), split=[64], verify=16, **options)
    assert_same(prefill, blocks, ("draft_logits",), "draft context of verify blocks")


def test_chunks_change_nothing_across_attention_spans(probe, golden):
    ids = np.random.default_rng(2).integers(2, 512, 1200)
    options = dict(model=golden / "dense-a", **CUDA.options)
    whole = probe.arrays(ids, OUTPUTS, **options)
    assert_same(whole, probe.arrays(ids, OUTPUTS, split=pieces(960, 64, 1200), **options), OUTPUTS, "chunks of 64")
    for rows in (5, 16):
        assert_same(whole, probe.arrays(ids, OUTPUTS, split=[960], verify=rows, **options), OUTPUTS, f"blocks of {rows}")


@pytest.fixture(scope="module")
def generated(probe, tiny):
    return probe.generate(tiny.prompts, N_GENERATE, model=tiny.target, draft=tiny.draft, **CUDA.options)


def test_tokens_are_those_of_the_reference_where_it_is_sure(tiny, generated):
    compared = 0
    for case, result in zip(tiny.cases, generated, strict=True):
        if case["min_logit_margin"] > MARGIN_MIN:
            n = len(case["output_ids"])
            assert result["ids"][:n] == case["output_ids"], case["prompt"]
            compared += 1
    print(f"{compared} of {len(tiny.cases)} prompts compared")
    assert compared > 5


def test_accept_length_is_that_of_the_reference(probe, tiny, generated):
    """Tokens committed by verify passes per pass, as the oracle's arithmetic has it, within 3 %."""
    def accept_length(results):
        return sum(len(r["ids"]) - 1 for r in results) / sum(len(r["steps"]) for r in results)

    reference = [{"ids": c["output_ids"], "steps": c["steps"]} for c in tiny.cases]
    short = probe.generate(tiny.prompts, 96, model=tiny.target, draft=tiny.draft, **CUDA.options)
    print(f"accept length {accept_length(short):.3f}, reference {accept_length(reference):.3f}")
    assert abs(accept_length(short) / accept_length(reference) - 1) < 0.03


@pytest.mark.parametrize("what, options", [("no drafter", dict(draft=None)), ("side by side", dict(parallel=7)),
                                           ("blocks of 5", dict(block_size=5)), ("chunks of 64", dict(split=[64] * 8))],
                         ids=lambda v: v.replace(" ", "-") if isinstance(v, str) else "")
def test_generation_is_the_same_tokens(probe, tiny, generated, what, options):
    other = probe.generate(tiny.prompts, N_GENERATE, **{**dict(model=tiny.target, draft=tiny.draft), **options},
                           **CUDA.options)
    for case, a, b in zip(tiny.cases, generated, other, strict=True):
        assert a["ids"] == b["ids"], f"{what}: {case['prompt']}"
