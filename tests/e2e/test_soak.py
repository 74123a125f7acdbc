"""Conversations of several users go on for long, while memory runs short, files on disk are damaged and the process is killed:
no token is ever wrong, nothing leaks."""
import os
import random
import signal
import threading
import time

import pytest
import spillway
from conftest import ROOT
from tiny_pair import TinyPair

PAIR = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
TEXT = [token for prompt in PAIR.prompts for token in prompt]
SETTINGS = {"kv.device_bytes": "24MiB", "kv.host_bytes": "24MiB", "kv.disk_bytes": "256MiB", "kv.disk_min_tokens": 64,
            "kv.restore": "always", "sched.max_seqs": 4, "limits.max_context": 1024}
N_TALKS, N_CLIENTS = 24, 4


class Talk:
    """A conversation whose turns are known beforehand: what is asked, and, once it was answered, what was answered."""

    def __init__(self, number):
        self.ids = TEXT[61 * number : 61 * number + 150 + 23 * number]
        self.answers = {}

    def turn(self, client, n_turns):
        """The prompt of the n-th turn holds all turns before it."""
        ids = list(self.ids)
        for n in range(n_turns + 1):
            if n in self.answers:
                ids += self.answers[n] + TEXT[n * 7 : n * 7 + 20]
                continue
            result = client.call("gen.start", {"prompt_ids": ids, "max_tokens": 16, "temperature": 0, "stream": False,
                                               "ignore_eos": True, "return_ids": True})
            self.answers[n] = result["ids"]
            return
        self.check(client, random.randrange(n_turns + 1))

    def check(self, client, n):
        ids = list(self.ids)
        for before in range(n):
            ids += self.answers[before] + TEXT[before * 7 : before * 7 + 20]
        result = client.call("gen.start", {"prompt_ids": ids, "max_tokens": 16, "temperature": 0, "stream": False,
                                           "ignore_eos": True, "return_ids": True})
        assert result["ids"] == self.answers[n], f"turn {n} of {len(self.ids)} tokens: other tokens than the first time"


def flip_a_byte(folder, choice):
    """Of something that is stored: most of a young segment is empty."""
    paths = sorted(folder.glob("segment-*"))
    if not paths:
        return
    with open(choice.choice(paths), "r+b") as f:
        for _ in range(64):
            at = choice.randrange(os.fstat(f.fileno()).st_size)
            byte = os.pread(f.fileno(), 1, at)
            if byte != b"\0":
                os.pwrite(f.fileno(), bytes([byte[0] ^ 1 << choice.randrange(8)]), at)
                return


def test_nothing_wrong_is_ever_served(daemon, tmp_path, request, long):
    seconds = request.config.getoption("--soak") or (3600 if long else 20)
    choice, talks, wrong = random.Random(11), [Talk(i) for i in range(N_TALKS)], []
    counts = {"turns": 0, "kills": 0, "flips": 0, "disk": 0}
    end, one = time.monotonic() + seconds, None
    locks = [threading.Lock() for _ in talks]

    def client_of(number, stop):
        mine = random.Random(number)
        try:
            with one.connect() as client:
                while not stop.is_set() and not wrong:
                    i = mine.randrange(len(talks))
                    with locks[i]:
                        talks[i].turn(client, mine.randrange(6))
                    counts["turns"] += 1
        except (spillway.ConnectionLost, spillway.ConnectError):
            pass
        except Exception as error:
            wrong.append(repr(error))

    # A slow machine does few turns in that time: a daemon serves some, and there is another until one came from disk.
    while (time.monotonic() < end or counts["disk"] == 0 and time.monotonic() < end + 300) and not wrong:
        one = daemon(**SETTINGS, **{"kv.disk_path": tmp_path / "cache"})
        stop = threading.Event()
        threads = [threading.Thread(target=client_of, args=(i, stop)) for i in range(N_CLIENTS)]
        for thread in threads:
            thread.start()
        begun, n_before, memory = time.monotonic(), counts["turns"], []
        until = begun + (choice.uniform(20, 60) if long else 4)
        while (time.monotonic() < until or counts["turns"] < n_before + 30 and time.monotonic() < begun + 60) and not wrong:
            time.sleep(0.5)
            with one.connect() as client:
                tier = choice.choice(["device", "host", "disk"])
                client.call("cache.evict", {"tier": tier, "bytes": choice.randrange(8 << 20)})
            if choice.random() < 0.3:
                flip_a_byte(tmp_path / "cache/segments", choice)
                counts["flips"] += 1
            memory.append(one.rss_bytes())
        stop.set()
        killed = choice.random() < 0.5
        if killed:
            os.kill(one.pid, signal.SIGKILL)
            counts["kills"] += 1
        for thread in threads:
            thread.join()
        if not killed:
            check_is_home(one)
            counts["disk"] += one.metrics()['spillway_cached_tokens_total{tier="disk"}']
        one.stop(status=-signal.SIGKILL if killed else 0)
        assert memory[-1] < memory[len(memory) // 2] + (16 << 20), memory
    assert not wrong, wrong
    print(counts)
    assert counts["turns"] > 0 and counts["disk"] > 0


def check_is_home(one):
    """When nothing runs, nothing is held: by seqs, copies or operations."""
    deadline = time.monotonic() + 20
    while True:
        m = one.metrics()
        held = {name: value for name, value in m.items()
                if name.startswith(("spillway_pool_pinned", "spillway_host_pinned", "spillway_host_filling",
                                    "spillway_disk_writing", "spillway_disk_pinned", "spillway_running")) and value}
        if not held:
            break
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    for group in "target_full", "target_state", "draft_full", "draft_sliding":
        slots = m.get(f'spillway_pool_slots{{group="{group}"}}', 0)
        assert m.get(f'spillway_pool_free_slots{{group="{group}"}}', 0) + \
            m.get(f'spillway_pool_indexed_slots{{group="{group}"}}', 0) in (slots, slots - 1), group
