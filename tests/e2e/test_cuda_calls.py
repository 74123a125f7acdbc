"""What steps ask of the CUDA runtime: nothing that holds a thread or the device up. And a daemon that does nothing leaves the
card idle. Exit 77 where there is no card or no CUDA in the build."""
import os
import shutil
import struct
import subprocess
import threading
import time

import pytest

COUNT = struct.Struct("48sQQ")  # of tests/fake/cuda_calls.c
WORK = {"cudaGraphLaunch", "copies", "host_functions"}  # a host function tells the daemon, as long as it is that one
STEPS = 1000
TICK_S = 0.1  # of the loop's timer
TEXT = " ".join(f"In room {i} lies key {i * 7919 % 10007}." for i in range(60))


@pytest.fixture
def counted(request, daemon):
    """counted(**settings): a daemon that counts, and a function that gives {name: (by the loop, by others)}."""
    if not request.config.getoption("--spillwayd-calls"):
        pytest.skip("--spillwayd-calls is not given: a build with CUDA makes it")
    if not os.path.exists("/dev/nvidiactl"):
        pytest.exit("no card", returncode=77)

    def start(**settings):
        one = daemon(program=request.config.getoption("--spillwayd-calls"), **{"model.backend": "cuda", **settings})
        folder = f"/proc/{one.pid}/fd"
        path = next(f"{folder}/{fd}" for fd in os.listdir(folder) if "memfd:cuda_calls" in os.readlink(f"{folder}/{fd}"))

        def read():
            with open(path, "rb") as memory:
                return {name.rstrip(b"\0").decode(): n for name, *n in COUNT.iter_unpack(memory.read())}

        return one, read

    return start


def steps(one):
    metrics = one.metrics()
    return sum(n for name, n in metrics.items() if name.startswith("spillway_steps_total"))


def serve(one, name, i):
    with one.connect() as client:
        client.call("session.open", {"name": name})
        for turn in range(2):
            client.complete(prompt=f"{i} {TEXT}", session=name, max_tokens=150, ignore_eos=True, speculate=i % 3 > 0,
                            temperature=0.5 * (i % 2), seed=i)
        client.generate(prompt=f"Once {i}", max_tokens=1000).cancel()


def serve_all(one, of):
    threads = [threading.Thread(target=serve, args=(one, f"{of}{i}", i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with one.connect() as client:
        client.call("session.park", {"name": f"{of}0"})
        client.call("cache.evict", {"tier": "device", "all": True})
        client.call("session.resume", {"name": f"{of}0", "wait": True})


def test_steps_make_no_call_that_waits_allocates_or_asks(counted, tmp_path):
    one, read = counted(**{"kv.disk_path": tmp_path / "kv", "kv.disk_bytes": "256MiB", "kv.host_bytes": "64MiB",
                           "kv.disk_min_tokens": 64, "kv.restore": "always"})
    serve_all(one, "warm")
    before, n_steps, at = read(), steps(one), time.monotonic()
    rounds = 0
    while steps(one) - n_steps < STEPS:
        serve_all(one, f"round{rounds}")
        rounds += 1
        assert rounds < 50
    seconds, n_steps = time.monotonic() - at, steps(one) - n_steps
    after = read()
    loop, others = ({name: after[name][i] - before[name][i] for name in after} for i in (0, 1))
    print(f"\n{n_steps:.0f} steps in {seconds:.1f} s: {after['cudaGraphLaunch'][1] - before['cudaGraphLaunch'][1]} graphs, "
          f"{loop['copies'] + others['copies']} copies, {others['host_functions']} notices, "
          f"{loop['cudaStreamQuery']} looks at the device's state by the loop's timer")
    assert others["cudaGraphLaunch"] + loop["cudaGraphLaunch"] >= n_steps and loop["copies"] + others["copies"] > 0
    assert {name: n for name, n in others.items() if n and name not in WORK} == {}
    # The timer looks whether the card still lives, on no step's way.
    assert {name: n for name, n in loop.items() if n and name not in WORK | {"cudaStreamQuery"}} == {}
    assert loop["cudaStreamQuery"] <= seconds / TICK_S + 5


def test_an_idle_daemon_leaves_the_card_idle(counted):
    one, read = counted()
    with one.connect() as client:
        client.complete(prompt="Once", max_tokens=100, ignore_eos=True)
    time.sleep(2)
    before = read()
    smi = shutil.which("nvidia-smi")
    assert smi, "nvidia-smi is missing"
    ask = [smi, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
    seen = []
    for _ in range(5):
        time.sleep(1)
        seen.append(int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout))
    print(f"\nutilization: {seen} %")
    assert seen == [0] * 5
    assert read() == before
