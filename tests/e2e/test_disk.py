"""What left device and host memory comes back from disk, to the last page, also to another process; damage is a miss."""
import concurrent.futures
import os
import random
import signal
import time

import pytest
import spillway
from conftest import ROOT
from tiny_pair import TinyPair

PAIR = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
TEXT = [token for prompt in PAIR.prompts for token in prompt] * 2
HEADER_BYTES = 4096
SLOT_MAGIC = b"SpwySlot"


@pytest.fixture
def tiers(daemon, tmp_path):
    """Starts a daemon with all three tiers; another one on the same folder finds what the first left."""

    def start(env=None, **settings):
        return daemon(env=env, **{"kv.host_bytes": "64MiB", "kv.disk_path": tmp_path / "cache", "kv.disk_bytes": "512MiB",
                         "kv.disk_min_tokens": 64, "kv.restore": "always", "kv.warm_up": 0, **settings})

    return start


def generate(client, ids, n=24, **params):
    return client.call("gen.start", {"prompt_ids": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                                     "stream": False, "return_ids": True, **params})


def evict(client, *tiers):
    for tier in tiers:
        client.call("cache.evict", {"tier": tier, "all": True})


def wait_scanned(one):
    deadline = time.monotonic() + 20
    while one.metrics().get("spillway_disk_scanning", 0) != 0:
        assert time.monotonic() < deadline, "the folder is still being read"
        time.sleep(0.02)


def usage(result):
    return result["usage"]["cached"]


def boundary(n_prompt):
    return (n_prompt - 1) // 64 * 64


def test_a_prefix_comes_back_from_disk_to_the_last_page(tiers, long):
    with tiers(**{"kv.device_bytes": "256MiB"}).connect() as client:  # nothing of the longest is streamed
        for k in range(1, 41 if long else 3):
            for n_prompt in 64 * k - 1, 64 * k, 64 * k + 1:
                ids = TEXT[n_prompt : 2 * n_prompt]
                cold = generate(client, ids)
                evict(client, "device", "host")
                from_disk = generate(client, ids)
                assert usage(from_disk) == {"device": 0, "host": 0, "disk": boundary(n_prompt)}, n_prompt
                assert from_disk["ids"] == cold["ids"]
                evict(client, "device")
                from_host = generate(client, ids)
                assert usage(from_host) == {"device": 0, "host": boundary(n_prompt), "disk": 0}, n_prompt
                assert from_host["ids"] == cold["ids"]


def test_a_restore_tells_where_its_time_went(tiers):
    one = tiers()
    with one.connect() as client:
        generate(client, TEXT[:700])
        evict(client, "device", "host")
        assert usage(generate(client, TEXT[:700]))["disk"] == 640
        evict(client, "device")
        from_host = generate(client, TEXT[:700])
        assert usage(from_host)["host"] == 640
        metrics = one.metrics()
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in one.log().splitlines()
             if "event=restore " in line]
    stages = "read", "check", "copy", "wait"
    assert [(line["result"], line["reason"], line["n_tokens"]) for line in lines] == [("done", "request", "640")] * 2
    for line in lines:
        assert float(line["ms"]) == pytest.approx(sum(float(line[f"{stage}_ms"]) for stage in stages), abs=0.3)
    assert lines[0]["disk_slots"] == lines[0]["slots"] and float(lines[0]["read_ms"]) > 0
    assert lines[1]["disk_slots"] == "0" and lines[1]["copy_ms"] == lines[1]["ms"]
    for stage in stages:
        assert metrics[f'spillway_restore_seconds_total{{stage="{stage}"}}'] == pytest.approx(
            sum(float(line[f"{stage}_ms"]) for line in lines) / 1000, abs=0.0003)


def test_logprobs_are_the_same_bits_from_every_tier(tiers):
    ids = TEXT[900:1500]
    first = tiers()
    with first.connect() as client:
        cold = generate(client, ids, logprobs=20)["logprobs"]
        assert len(cold) == 24 and all(len(token["top"]) == 20 for token in cold)
        for gone, tier in ([], "device"), (["device"], "host"), (["device", "host"], "disk"):
            evict(client, *gone)
            warm = generate(client, ids, logprobs=20)
            assert usage(warm)[tier] == boundary(len(ids))
            assert warm["logprobs"] == cold, tier
    first.stop()
    second = tiers()
    wait_scanned(second)
    with second.connect() as client:
        warm = generate(client, ids, logprobs=20)
        assert usage(warm)["disk"] == boundary(len(ids)) and warm["logprobs"] == cold


def test_another_process_finds_what_the_first_one_left(tiers):
    lengths = [65, 200, 640, 1281]
    first = tiers()
    with first.connect() as client:
        cold = {n: generate(client, TEXT[n : 2 * n])["ids"] for n in lengths}
        evict(client, "device", "host")
    first.stop()
    second = tiers()
    wait_scanned(second)
    with second.connect() as client:
        for n in lengths:
            warm = generate(client, TEXT[n : 2 * n])
            assert usage(warm) == {"device": 0, "host": 0, "disk": boundary(n)}
            assert warm["ids"] == cold[n]


def test_drafts_after_a_restore_from_disk_are_as_good_as_before(tiers):
    with tiers(**{"draft.fallback": "false"}).connect() as client:
        ids = TEXT[:700]
        generate(client, ids, n=1)
        warm = generate(client, ids, n=64)["usage"]["draft"]
        evict(client, "device", "host")
        restored = generate(client, ids, n=64)
        assert usage(restored)["disk"] == 640
        assert restored["usage"]["draft"] == warm


def test_a_prefix_longer_than_host_memory_comes_back_through_it(tiers):
    with tiers(**{"kv.host_bytes": "16MiB", "kv.device_bytes": "128MiB", "limits.max_context": 8192}).connect() as client:
        ids = (TEXT * 4)[:6000]
        cold = generate(client, ids)
        host = client.call("cache.stats")["tiers"]["host"]
        evict(client, "device", "host")
        warm = generate(client, ids)
        assert host["bytes"] <= 16 << 20
        assert warm["ids"] == cold["ids"]


def test_a_disk_that_takes_only_multiples_of_16_kib(tiers, request):
    coarse = request.config.getoption("--coarse-disk") or pytest.skip("needs --coarse-disk")
    env = {"LD_PRELOAD": coarse, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
    with tiers(env).connect() as client:
        ids = TEXT[:700]
        cold = generate(client, ids)
        evict(client, "device", "host")
        warm = generate(client, ids)
        assert usage(warm) == {"device": 0, "host": 0, "disk": 640}
        assert warm["ids"] == cold["ids"]


def segments(folder):
    return sorted(path for path in (folder / "cache/segments").iterdir() if path.stat().st_size >= 8 << 20)


def damage(path, where):
    """Overwrites one spot of every slot that holds something: of its header, or of its payload."""
    n = 0
    with open(path, "r+b") as f:
        for at in range(0, os.fstat(f.fileno()).st_size, HEADER_BYTES):
            block = os.pread(f.fileno(), HEADER_BYTES, at)
            if at > 0 and block[:8] == SLOT_MAGIC:
                spot = at + 200 if where == "header" else at + HEADER_BYTES + 100
                byte = os.pread(f.fileno(), 1, spot)
                os.pwrite(f.fileno(), bytes([byte[0] ^ 0x40]), spot)
                n += 1
    return n


def test_after_a_start_what_was_written_last_comes_from_host_memory(tiers):
    ids = TEXT[:700]
    one = tiers()
    with one.connect() as client:
        cold = generate(client, ids)
    one.stop()
    one = tiers(**{"kv.warm_up": 25})
    deadline = time.monotonic() + 20
    while one.metrics()["spillway_warming"] != 0:
        assert time.monotonic() < deadline, "it is still being brought up"
        time.sleep(0.05)
    before = one.metrics()
    assert before["spillway_warmed_prefixes_total"] > 0 and "disk.warmed" in one.log()
    with one.connect() as client:
        warm = generate(client, ids)
        assert usage(warm) == {"device": 0, "host": 640, "disk": 0}
        assert warm["ids"] == cold["ids"]
    assert one.metrics()["spillway_disk_read_bytes_total"] == before["spillway_disk_read_bytes_total"]


def test_damage_is_found_before_anybody_asks(tiers, tmp_path):
    one = tiers()
    with one.connect() as client:
        generate(client, TEXT[:700])
    one.stop()
    segments = sorted((tmp_path / "cache/segments").iterdir())
    with open(next(path for path in segments if SLOT_MAGIC in path.read_bytes()), "r+b") as segment:
        at = segment.read().index(SLOT_MAGIC) + HEADER_BYTES + 100
        segment.seek(at)
        byte = segment.read(1)[0]
        segment.seek(at)
        segment.write(bytes([byte ^ 1]))
    one = tiers()
    deadline = time.monotonic() + 30
    while one.metrics()['spillway_scrub_damaged_total{tier="disk"}'] == 0:
        assert time.monotonic() < deadline, "nobody looks"
        time.sleep(0.2)
    assert one.metrics()['spillway_scrub_damaged_total{tier="disk"}'] == 1
    assert "disk.damaged" in one.log()


@pytest.mark.parametrize("where", ["header", "payload"])
def test_damage_while_it_was_down_is_counted_and_never_served(tiers, tmp_path, where):
    prompts = [TEXT[100 * i : 100 * i + 300] for i in range(4)]
    first = tiers()
    with first.connect() as client:
        cold = [generate(client, ids)["ids"] for ids in prompts]
        evict(client, "device", "host")
    first.stop()
    assert sum(damage(path, where) for path in segments(tmp_path)) >= 4 * 5
    second = tiers()
    wait_scanned(second)
    with second.connect() as client:
        for ids, expected in zip(prompts, cold):
            result = generate(client, ids)
            assert result["ids"] == expected
            assert usage(result)["disk"] == 0
        metrics = second.metrics()
        bad = metrics['spillway_disk_scanned_total{found="bad"}' if where == "header" else
                      'spillway_disk_errors_total{kind="damaged"}']
        assert bad > 0
        evict(client, "device", "host")  # it heals: what was computed again is written again
        for ids, expected in zip(prompts, cold):
            result = generate(client, ids)
            assert usage(result)["disk"] == boundary(len(ids))
            assert result["ids"] == expected


def test_killed_at_any_instant_it_finds_only_what_is_right(tiers, long):
    """Prompts go up and down between the tiers while the process is killed, again and again."""
    prompts = [TEXT[150 * i : 150 * i + 200 + 53 * i] for i in range(6)]
    expected, choice, n_from_disk, n_done = {}, random.Random(7), 0, 0

    def work(one):
        nonlocal n_from_disk, n_done
        try:
            with one.connect() as client:
                while True:
                    i = choice.randrange(len(prompts))
                    result = generate(client, prompts[i])
                    assert result["ids"] == expected.setdefault(i, result["ids"]), f"prompt {i}"
                    n_from_disk += usage(result)["disk"]
                    n_done += 1
                    evict(client, *choice.choice([["device"], ["host"], ["device", "host"]]))
        except (spillway.ConnectionLost, spillway.ConnectError):
            pass

    for _ in range(200 if long else 8):
        one = tiers(**{"sched.max_seqs": 4})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(work, one)
            until = n_done + choice.randrange(1, 6)
            while n_done < until and not running.done():
                time.sleep(0.01)
            time.sleep(choice.uniform(0, 0.3))
            os.kill(one.pid, signal.SIGKILL)
            running.result()
        one.stop(status=-signal.SIGKILL)
    assert n_from_disk > 0


def test_a_second_signal_while_it_writes_its_pages_ends_it_at_once(tiers, long):
    """What it was writing is right or not there."""
    n_writing = 0
    settings = {"kv.disk_min_tokens": 100000}  # nothing is written that must not be
    for turn in range(20 if long else 4):
        prompts = [TEXT[91 * turn + 150 * i : 91 * turn + 150 * i + 400] for i in range(5)]
        expected = []
        one = tiers(**settings)
        with one.connect() as client:
            for i, ids in enumerate(prompts):
                client.call("session.open", {"name": f"s{turn}-{i}"})
                expected.append(generate(client, ids, 4, session=f"s{turn}-{i}")["ids"])
        one.process.send_signal(signal.SIGTERM)
        while ("drain.begin" not in one.log() or one.log().count("event=save") < turn % 4) and one.process.poll() is None:
            time.sleep(0.001)
        began = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        status = one.process.wait(timeout=30)
        one.stop(status=status)
        if status == 0:  # it was faster
            continue
        assert status == 1 and "event=exit.now" in one.log()
        assert time.monotonic() - began < 5, "it does not wait for what it writes"
        n_writing += one.log().count("event=save") < len(prompts)
        one = tiers(**settings)
        with one.connect() as client:
            client.call("cache.verify")
            for i, ids in enumerate(prompts):
                assert generate(client, ids, 4)["ids"] == expected[i], f"prompt {i}"
        one.stop()
    assert n_writing > 0
