"""Neither the drafter nor neighbours in a batch change what is written, in any mode.

Length is a matter of time: the fastest mode writes 96 tokens for every prompt, the others 32 for every seventh. With --long all
modes write 256 for every prompt.
"""
import pytest

from cases import FAST, MODES

N_TOKENS_LONG, N_TOKENS, N_TOKENS_SLOW = 256, 96, 32
BLOCKS = (1, 2, 7)


def generate_both(probe, tiny, tmp_path, mode, prompts, n):
    """The same prompts with and without drafter, side by side on a thread each."""
    options = dict(model=tiny.target, ignore_eos=True, threads=1, **mode.options)
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    with_draft = probe.start_generate(tmp_path / "on", prompts, n, draft=tiny.draft, **options)
    without = probe.start_generate(tmp_path / "off", prompts, n, **options)
    try:
        return probe.finish_generate(with_draft), probe.finish_generate(without)
    finally:
        for process, _ in (with_draft, without):
            process.kill()      # nothing to kill unless the other one failed


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drafter_on_and_off_write_the_same(probe, tiny, tmp_path, pytestconfig, mode):
    is_long = pytestconfig.getoption("--long")
    whole = mode == FAST[-1] or is_long
    n = N_TOKENS_LONG if is_long else N_TOKENS if whole else N_TOKENS_SLOW
    cases = tiny.cases if whole else tiny.cases[::7]
    drafted, plain = generate_both(probe, tiny, tmp_path, mode, [case["prompt_ids"] for case in cases], n)
    assert len(drafted) == len(plain) == len(cases)
    for case, a, b in zip(cases, drafted, plain):
        assert len(b["ids"]) == n
        assert a["ids"] == b["ids"], case["prompt"]
    passes = sum(len(result["steps"]) for result in drafted)
    print(f"{mode}: {len(plain) * n} tokens alike, accept length {len(plain) * (n - 1) / passes:.2f}")


@pytest.mark.parametrize("mode", FAST[-1:], ids=str)
def test_block_size_changes_nothing(probe, tiny, mode):
    prompts = tiny.prompts[:4]
    options = dict(model=tiny.target, draft=tiny.draft, ignore_eos=True, **mode.options)
    whole = [result["ids"] for result in probe.generate(prompts, 64, **options)]
    for block in BLOCKS:
        assert [r["ids"] for r in probe.generate(prompts, 64, block_size=block, **options)] == whole, f"block {block}"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_neighbours_in_a_batch_change_nothing(probe, tiny, mode):
    prompts = tiny.prompts[5:10]
    options = dict(model=tiny.target, draft=tiny.draft, ignore_eos=True, **mode.options)
    alone = probe.generate(prompts, 12, **options)
    together = probe.generate(prompts, 12, parallel=4, **options)
    assert [r["ids"] for r in together] == [r["ids"] for r in alone]
    assert [r["steps"] for r in together] == [r["steps"] for r in alone]
