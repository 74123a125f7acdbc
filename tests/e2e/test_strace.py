"""The loop thread while it serves, as the kernel sees it. Where tracing is not allowed: exit 77."""
import re
import shutil
import signal
import subprocess
import threading

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
