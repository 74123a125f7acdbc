"""Resident memory stays where it is: many small requests over connections that come and go."""
import asyncio
import os
import random
import time
from pathlib import Path

import pytest
from raw import Raw
from test_abuse import wait_at_rest

N_CLIENTS = 12


async def client(path, n_requests, dice):
    """Connections of a few requests each; every fifth connection is left in the middle of one."""
    n = 0
    while n < n_requests:
        async with await Raw.open(path) as raw:
            for _ in range(dice.randrange(1, 12)):
                what, n = dice.random(), n + 1
                if what < 0.4:
                    await raw.call("gen.start", prompt=f"{dice.random()} and so on", max_tokens=dice.randrange(1, 4),
                                   stream=dice.random() < 0.5, logprobs=dice.choice([0, 3]))
                elif what < 0.6:
                    await raw.call("text.tokenize", text="so it goes " * dice.randrange(1, 400))
                elif what < 0.7:
                    await raw.call("chat.render", messages=[{"role": "user", "content": "a" * dice.randrange(500)}])
                elif what < 0.8:
                    name = str(dice.randrange(20))
                    await raw.call("session.open", name=name)
                    await asyncio.gather(raw.call("gen.start", prompt="a", max_tokens=1, session=name),
                                         raw.call("session.close", name=name), return_exceptions=True)
                elif what < 0.9:
                    await raw.call("server.metrics")
                else:
                    await asyncio.gather(raw.call("no.method"), raw.call("gen.start", top_p=5), return_exceptions=True)
            if dice.random() < 0.2:
                await raw.start("gen.start", prompt="so it goes " * dice.randrange(1, 300))
    return n


def serve(one, n_requests, seed):
    async def all_clients():
        dice = random.Random(seed)
        return sum(await asyncio.gather(*(client(one.socket, n_requests // N_CLIENTS, random.Random(dice.random()))
                                          for _ in range(N_CLIENTS))))

    return asyncio.run(all_clients())


def memory(one):
    """KiB: of the C library's heap in use, and of all mappings. Pools are mapped once, and touched as requests reach them:
    what is resident of them says how many there were at a time, not whether anything is lost."""
    heap = 0
    with open(f"/proc/{one.pid}/smaps") as smaps:
        for line in smaps:
            if line.endswith("[heap]\n"):
                heap = None
            elif heap is None and line.startswith("Rss:"):
                heap = int(line.split()[1])
    with open(f"/proc/{one.pid}/statm") as statm:
        return heap or 0, int(statm.read().split()[0]) * 4


def test_memory_is_flat_over_many_requests(daemon, long):
    one = daemon(**{"kv.device_bytes": "48MiB"})
    n_requests = 20000 if long else 600
    serve(one, 2000 if long else 300, 1)  # what the C library keeps for the next burst is there now
    n_fds, n = one.n_fds(), 0
    sizes, resident = [memory(one)], [one.rss_bytes() >> 10]
    for seed in range(4):
        n += serve(one, n_requests // 4, 2 + seed)
        wait_at_rest(one, n_fds)
        sizes.append(memory(one))
        resident.append(one.rss_bytes() >> 10)
    print(f"{n} requests, KiB of heap and mappings {sizes}, resident {resident}")
    if not one.has_sanitizer():  # those keep what was freed
        assert sizes[-1][0] - sizes[0][0] < 512
        assert sizes[-1][1] - sizes[0][1] < 2048
        assert max(resident) - resident[0] < 48 << 10


def leave(folder, root):
    """Into the root; the folder can go when the last process has left it."""
    (root / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError((folder / "cgroup.procs").read_text())


@pytest.fixture
def cgroup():
    """A cgroup of the second version of its own, in which this process is for as long."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        folder = root / f"spillway-test-{os.getpid()}"
        if "0::/\n" not in Path("/proc/self/cgroup").read_text() or not (root / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        leave(folder, root)
        return
    pytest.skip("no cgroup v2 in which one can be made")


def test_the_cgroup_it_runs_in_is_watched_for_pressure(cgroup, daemon):
    if not (cgroup / "memory.pressure").exists():
        pytest.skip("this kernel tells no pressure")
    one = daemon(**{"kv.host_bytes": "64MiB"})
    assert f"path={cgroup}/memory.pressure" in next(line for line in one.log().splitlines() if "pressure.watched" in line)
    assert one.metrics()["spillway_pressure_events_total"] == 0
