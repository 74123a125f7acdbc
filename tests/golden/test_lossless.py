"""The drafter never changes what is written, in any mode.

The length is a matter of time: `fast` writes 256 tokens for every prompt, the two modes that compute in double write 64.
"""
import pytest

from cases import BF16, FAST, MODES, REFERENCE

N_TOKENS_FAST = 256
N_TOKENS_DOUBLE = 64
BLOCKS = (1, 2, 7)


def generate_both(probe, tiny, tmp_path, mode, n):
    """The same prompts with and without drafter, side by side on a thread each."""
    options = dict(model=tiny.target, ignore_eos=True, threads=1, **mode.options)
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    with_draft = probe.start_generate(tmp_path / "on", tiny.prompts, n, draft=tiny.draft, **options)
    without = probe.start_generate(tmp_path / "off", tiny.prompts, n, **options)
    return probe.finish_generate(with_draft), probe.finish_generate(without)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drafter_on_and_off_write_the_same(probe, tiny, tmp_path, mode):
    n = N_TOKENS_DOUBLE if mode in (REFERENCE, BF16) else N_TOKENS_FAST
    drafted, plain = generate_both(probe, tiny, tmp_path, mode, n)
    assert len(drafted) == len(plain) == len(tiny.prompts)
    for case, a, b in zip(tiny.cases, drafted, plain):
        assert len(b["ids"]) == n
        assert a["ids"] == b["ids"], case["prompt"]
    passes = sum(len(result["steps"]) for result in drafted)
    print(f"{mode}: {len(plain) * n} tokens alike, accept length {len(plain) * (n - 1) / passes:.2f}")


@pytest.mark.parametrize("mode", FAST, ids=str)
def test_block_size_changes_nothing(probe, tiny, mode):
    prompts = tiny.prompts[:4]
    options = dict(model=tiny.target, draft=tiny.draft, ignore_eos=True, **mode.options)
    whole = [result["ids"] for result in probe.generate(prompts, 64, **options)]
    for block in BLOCKS:
        assert [r["ids"] for r in probe.generate(prompts, 64, block_size=block, **options)] == whole, f"block {block}"
