"""A context that the device does not hold is streamed from host memory, and nobody sees it but in the times: architecture E6.

By default the prompt has 4,000 tokens, with --long 8,000, and every share of it on the device is tried with and without
drafts.
"""
import concurrent.futures
import re
import subprocess
import time

import pytest
import spillway
from conftest import ROOT
from tiny_pair import TinyPair

PAIR = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
TEXT = [token for prompt in PAIR.prompts for token in prompt] * 2
MIB = 1 << 20
N_ANSWER = 48
BYTES, FENCES = "spillway_streamed_bytes_total", "spillway_stream_fences_total"
PASSES = "spillway_stream_passes_total"
PAGES = 'spillway_streaming_seq_pages{tier="%s"}'


@pytest.fixture(scope="module")
def n_prompt(long):
    return 8000 if long else 4000


def generate(client, ids, n=N_ANSWER, **params):
    return client.call("gen.start", {"prompt_ids": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                                     "stream": False, "return_ids": True, **params})


@pytest.fixture(scope="module")
def plain(kept_daemon, n_prompt):
    """What a daemon writes whose device holds all of it."""
    with kept_daemon(**{"kv.device_bytes": "256MiB"}).connect() as client:
        return {(begin, n): generate(client, TEXT[begin : begin + n], n_answer, speculate=False)["ids"]
                for begin, n, n_answer in [(0, n_prompt, N_ANSWER), (7, 600, 700)]}


def small(n_context, device_bytes, **settings):
    return {"kv.device_bytes": device_bytes, "kv.host_bytes": 64 * MIB, "kv.restore_points": 1, "sched.max_seqs": 1,
            "sched.prefill_chunk": 64, "sched.max_batch_tokens": 64, "limits.max_context": n_context,
            "draft.fallback": "false", **settings}


def planned_pages(request, settings):
    """Of the model and of the drafter, as the plan of this configuration says; 0: it is refused."""
    args = [request.config.getoption("--spillwayd"), "--plan"]
    for key, value in {"model.backend": request.config.getoption("--backend"), **settings}.items():
        args += ["--set", f"{key}={value}"]
    plan = subprocess.run(args, capture_output=True, text=True, check=False).stdout
    found = [re.search(group + r" +\S+ \S+ +(\d+)", plan) for group in ("target_full", "draft_full")]
    return [int(slots[1]) - 1 if slots else 0 for slots in found]


def with_pages(request, n_pages, n_draft_pages=0, **settings):
    """The settings of the smallest device that has so many pages, for contexts that it does not hold."""
    for quarters in range(4 * 4, 4 * 64):
        found = small(2 * 64 * max(n_pages, n_draft_pages, 66), quarters * MIB // 4, **settings)
        planned = planned_pages(request, found)
        if planned[0] >= n_pages and planned[1] >= n_draft_pages:
            return found
    raise AssertionError(f"no device of {n_pages} pages")


def wait_until_nothing_is_left(one):
    for _ in range(200):
        metrics = one.metrics()
        if metrics[PAGES % "device"] == metrics[PAGES % "host"] == 0:
            return metrics
        time.sleep(0.05)
    raise AssertionError(metrics)


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("percent", [100, 75, 50, 10])
def test_any_share_on_the_device_gives_the_same_tokens(daemon, request, plain, n_prompt, long, percent, draft):
    if percent in (75, 50) and draft != (percent == 50) and not long:
        pytest.skip("with --long")
    n_pages = -(-(n_prompt + N_ANSWER) // 64)
    one = daemon(**with_pages(request, max(n_pages * percent // 100, 6), n_pages if draft else 0,
                              **({} if draft else {"draft.path": ""})))
    with one.connect() as client:
        answer = generate(client, TEXT[:n_prompt])
    assert answer["ids"] == plain[0, n_prompt]
    assert (answer["usage"]["draft"]["accepted"] > 0) == draft
    metrics = wait_until_nothing_is_left(one)
    assert (metrics[BYTES] > 0) == (metrics[FENCES] > 0) == (metrics[PASSES] > 0) == (percent < 100)
    assert 0 <= metrics["spillway_stream_late_fences_total"] <= metrics[FENCES]
    assert metrics["spillway_stream_pass_bytes"] <= metrics[BYTES]


def test_a_generation_crosses_over_and_goes_on(daemon, request, plain):
    """It begins on the device, outgrows it while it decodes, and page after page follows."""
    n_device = 14
    one = daemon(**with_pages(request, n_device))
    with one.connect() as client, one.connect() as watcher, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, client, TEXT[7:607], 700)
        seen = []
        while not answer.done():
            text = watcher.call("server.metrics")["text"]
            seen.append(tuple(int(re.search(re.escape(PAGES % tier) + r" (\d+)", text)[1]) for tier in ("device", "host")))
            time.sleep(0.01)
        assert answer.result()["ids"] == plain[7, 600]
    hosts = [host for _, host in seen if host > 0]
    assert hosts == sorted(hosts) and hosts[-1] > 3
    assert all(0 < device <= n_device + 2 for device, host in seen if host > 0)


def test_the_next_turn_finds_what_stayed_on_the_device(daemon, request, plain, n_prompt):
    with daemon(**with_pages(request, 30)).connect() as client:
        assert generate(client, TEXT[:n_prompt])["ids"] == plain[0, n_prompt]
        again = generate(client, TEXT[:n_prompt])
        assert again["ids"] == plain[0, n_prompt]
        assert again["usage"]["cached"]["device"] >= 64 * 10


def test_many_with_one_that_does_not_fit_get_their_own_tokens(daemon, request, plain, n_prompt):
    one = daemon(**with_pages(request, 30, **{"sched.max_seqs": 3, "kv.restore": "always"}))
    with one.connect() as client:
        alone = [generate(client, TEXT[100 * i : 100 * i + 90 + 37 * i], cache="bypass")["ids"] for i in range(6)]
        large = client.generate(prompt_ids=TEXT[:n_prompt], max_tokens=N_ANSWER, temperature=0, ignore_eos=True,
                                stream=False, return_ids=True)
        others = [client.generate(prompt_ids=TEXT[100 * i : 100 * i + 90 + 37 * i], max_tokens=N_ANSWER, temperature=0,
                                  ignore_eos=True, stream=False, return_ids=True) for i in range(6)]
        assert [other.result()["ids"] for other in others] == alone
        assert large.result()["ids"] == plain[0, n_prompt]
    assert one.metrics()[BYTES] > 0


def test_the_arithmetic_of_a_step_is_told_at_the_start(daemon, request):
    settings = with_pages(request, 30)
    one = daemon(**settings)
    line = re.search(r"streaming .*context=(\d+) n_tokens=(\d+) token_bytes=(\d+) step_bytes=(\d+) link_mb_per_s=(\d+) "
                     r"step_floor_ms=([\d.]+)", one.log())
    context, n_tokens, token_bytes, step_bytes, link, floor_ms = map(float, line.groups())
    assert n_tokens < context == settings["limits.max_context"]
    assert n_tokens * token_bytes == step_bytes
    assert floor_ms == pytest.approx(step_bytes / link / 1000, rel=0.1, abs=0.1)


def test_what_neither_tier_holds_is_refused_with_the_numbers(daemon, request):
    settings = {**small(0, 16 * MIB), "kv.host_bytes": 16 * MIB}
    one = daemon(**settings)
    with one.connect() as client, pytest.raises(spillway.ContextLength, match=r"\d+ tokens"):
        generate(client, TEXT * 4)
    log = one.log()
    assert "kv.device_bytes and kv.host_bytes hold no more" in log
