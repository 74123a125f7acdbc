"""The loop thread while it serves, as the kernel sees it. Where tracing is not allowed: exit 77."""
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import pytest

# name(arguments) = result <seconds>
CALL = re.compile(r"(\w+)\((.*)\)\s+= .*<([\d.]+)>$")
NEVER = set("""open openat openat2 creat stat lstat fstat newfstatat statx access faccessat faccessat2 readlink readlinkat
    getdents64 unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link symlink chmod fchmod truncate ftruncate
    fallocate fsync fdatasync sync syncfs sync_file_range msync pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
    nanosleep clock_nanosleep select pselect6 ppoll wait4 waitid flock execve clone clone3""".split())
ON_DESCRIPTOR = {"read", "readv", "write", "writev", "close", "sendfile"}


def complaint(call, arguments, seconds, futex_s):
    if call in NEVER:
        return "may block"
    if call == "poll" and not arguments.endswith(", 0"):
        return "waits"
    if call == "futex" and "FUTEX_WAIT" in arguments and seconds > futex_s:
        return f"waits for more than {futex_s} s"
    if call in ON_DESCRIPTOR and re.match(r"\d+</", arguments) and not arguments.startswith("2<"):
        return "is of a file"
    return None


def attach(pid, trace):
    strace = shutil.which("strace")
    assert strace, "strace is missing: install the package strace"
    tracer = subprocess.Popen([strace, "-T", "-y", "-o", str(trace), "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    line = tracer.stderr.readline()
    if "attached" not in line:
        tracer.wait()
        pytest.exit(f"tracing is not allowed here: {line}", returncode=77)
    return tracer


def test_the_loop_thread_makes_no_call_that_blocks_while_it_serves(daemon, tmp_path, long):
    conf, trace = tmp_path / "spillway.conf", tmp_path / "trace"
    conf.write_text("[sched]\nqueue_max = 100\n")
    one = daemon(args=("--config", str(conf)))
    tracer = attach(one.pid, trace)

    def serve(i):
        with one.connect() as client:
            client.generate(prompt=f"Once {i}", max_tokens=40, ignore_eos=True).result()
            client.call("text.tokenize", {"text": "Once " * 20000})
            client.call("chat.render", {"messages": [{"role": "user", "content": "Once " * 20000}]})
            client.call("session.open", {"name": f"s{i}"})
            client.complete(prompt="Once", session=f"s{i}", max_tokens=8)
            client.call("session.close", {"name": f"s{i}"})
            for method in "server.metrics", "server.stats", "server.config", "cache.stats", "gen.list", "server.reload":
                client.call(method)
            client.generate(prompt="Once", max_tokens=1000).cancel()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(32 if long else 3)]
    for thread in threads:
        thread.start()
    one.process.send_signal(signal.SIGHUP)
    for thread in threads:
        thread.join()
    tracer.send_signal(signal.SIGINT)
    tracer.wait()
    calls = [CALL.match(line) for line in trace.read_text().splitlines()]
    calls = [match.groups() for match in calls if match]
    assert sum(call == "epoll_wait" for call, *_ in calls) > 10 and any(call == "write" for call, *_ in calls)
    futex_s = 0.001 if long else 0.05  # another thread that holds the lock may have lost its core
    bad = [(why, call, arguments[:100], seconds) for call, arguments, seconds in calls if
           (why := complaint(call, arguments, float(seconds), futex_s))]
    waits = [float(seconds) for call, arguments, seconds in calls if call == "futex" and "FUTEX_WAIT" in arguments]
    print(f"\n{len(calls)} calls, {len(waits)} waits for a lock, the longest {max(waits, default=0) * 1e3:.3f} ms")
    assert not bad, bad[:10]


def threads(pid):
    """Those that work on the steps: the loop, and what the CPU backend calls its device. Of the process's others, which
    make files and check sums, none is waited for by these."""
    loop, device = pid, []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/comm") as comm:
            name = comm.read().strip()
        if re.fullmatch(r"device|compute|copy|worker-\d+", name):
            device.append(int(task))
    return loop, device


def complaint_of_ring(call, arguments):
    """Sending operations is allowed, and taking what has come; waiting for one is not."""
    if call == "io_uring_enter" and int(arguments.split(", ")[2]) > 0:
        return "waits for an operation"
    return None


def test_spilling_at_full_rate_makes_no_file_call_in_a_thread_of_the_steps(daemon, tmp_path, long):
    """More is computed than device and host memory hold, and all of it is due on disk, with one flush after the other. In at
    least 1,000 steps the loop's thread makes no call that a disk may hold up, nor any of the device's threads: none of a file
    by name, none on a file's descriptor, no sync. Allowed are io_uring_enter that waits for nothing, calls on sockets, events
    and the terminal, and for a lock or, for the device, for work to come."""
    one = daemon(**{"kv.device_bytes": "24MiB", "kv.host_bytes": "16MiB", "kv.disk_path": tmp_path / "kv",
                    "kv.disk_bytes": "256MiB", "kv.disk_min_tokens": 64, "sched.max_seqs": 4, "limits.max_context": 1024})
    loop, device = threads(one.pid)
    assert len(device) >= 3, "a loop, a device, a compute and a copy thread"
    traces = {tid: tmp_path / f"trace-{tid}" for tid in [loop, *device]}
    before = one.metrics()
    tracers = [attach(tid, trace) for tid, trace in traces.items()]
    stop = threading.Event()

    def n_steps():
        now = one.metrics()
        return sum(now[name] - before[name] for name in now if name.startswith("spillway_steps_total"))

    def serve(i):
        with one.connect() as client:
            turn = 0
            while not stop.is_set():
                name = f"s{i}-{turn}"
                client.call("session.open", {"name": name})
                client.complete(prompt=f"{i} {turn} " + "Once upon a time " * 60, session=name, max_tokens=40,
                                temperature=0, ignore_eos=True)
                client.call("session.close", {"name": name})
                turn += 1

    def flush():
        with one.connect() as client:
            while not stop.is_set():
                client.call("cache.flush")

    running = [threading.Thread(target=serve, args=(i,)) for i in range(4)] + [threading.Thread(target=flush)]
    for thread in running:
        thread.start()
    samples, wanted = [], 5000 if long else 1000
    while (n := n_steps()) < wanted:
        time.sleep(0.05)
        if n >= 20 * len(samples):
            samples.append(one.metrics()["spillway_disk_saved_bytes_total"])
    stop.set()
    for thread in running:
        thread.join()
    after, steps = one.metrics(), n_steps()
    for tracer in tracers:
        tracer.send_signal(signal.SIGINT)
    for tracer in tracers:
        tracer.wait()
    grown = {name: after[name] - before[name] for name in after}
    calls = {tid: [match.groups() for match in map(CALL.match, trace.read_text().splitlines()) if match]
             for tid, trace in traces.items()}
    bad = [(tid, why, call, arguments[:100]) for tid in calls for call, arguments, _ in calls[tid] if
           (why := complaint(call, arguments, 0, 1) or complaint_of_ring(call, arguments))]
    n_sent = sum(call == "io_uring_enter" for call, *_ in calls[loop])
    print(f"\n{steps:.0f} steps; {grown['spillway_disk_saved_bytes_total'] / 2**20:.0f} MiB to disk, "
          f"{grown['spillway_spilled_bytes_total'] / 2**20:.0f} MiB to host memory; the loop made {len(calls[loop])} calls, "
          f"{n_sent} of the ring, the device's {len(device)} threads {sum(len(calls[tid]) for tid in device)}")
    assert len(set(samples)) > len(samples) / 2, "pages went down all the time"
    assert grown["spillway_disk_saved_bytes_total"] > 4 * 16 << 20, "more than host memory holds"
    for tier in "host", "disk":
        assert sum(grown[name] for name in grown if name.startswith(f"spillway_{tier}_evictions_total")) > 0, tier
    assert after['spillway_disk_feature{feature="io_uring"}'] == (n_sent > 0)
    assert any(call == "epoll_wait" for call, *_ in calls[loop])
    assert not bad, bad[:10]
