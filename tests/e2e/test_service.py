"""The daemon under a service manager: readiness, watchdog, reload, stop, sockets passed in, exit codes."""
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

import spillway
from conftest import ROOT
from manager import manager, thread_id  # noqa: F401

TINY = ROOT / "share/tiny/target"


def big_dummy(folder, n_layers=8, **more):
    """A folder that takes a few seconds to load, without weights in it."""
    config = json.loads((TINY / "config.json").read_text())
    kinds = config["layer_types"][:4]
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": n_layers,
               "layer_types": kinds * (n_layers // 4)} | more
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "tokenizer.json", folder)
    return {"model.path": folder, "model.load_format": "dummy", "draft.path": ""}


def run(program, *args, env=None, **options):
    """To its end, which comes by itself."""
    return subprocess.run([program, *map(str, args)], env={**os.environ, **(env or {})}, capture_output=True, text=True,
                          timeout=120, **options)


@pytest.fixture
def spillwayd(request):
    return request.config.getoption("--spillwayd")


def start_generation(client, **params):
    """One that runs: it has its first token."""
    generation = client.generate(prompt="Once", temperature=0, ignore_eos=True, **params)
    for event in generation:
        if event["type"] == "delta":
            return generation
    raise AssertionError("it ended without a token")


# ---- start


def test_ready_comes_when_requests_are_answered_and_more_time_is_asked_for_until_then(daemon, manager, tmp_path):
    systemd = manager()
    one = daemon(ready=False, env=systemd.env, **big_dummy(tmp_path / "big", 16), **{"kv.device_bytes": "128MiB"})
    assert int(systemd.wait(r"EXTEND_TIMEOUT_USEC=(\d+)")[1]) >= 10_000_000
    systemd.wait(r"STATUS=loading: .+, \d+ %")
    with one.connect() as client:
        health = client.call("server.health")
        assert health["phase"] == "loading" and not health["ready"] and 0 <= health["percent"] < 100
        assert health["live"] and health["progressing"]
        with pytest.raises(spillway.ModelNotReady):
            client.call("text.tokenize", {"text": "early"})
        assert not any("READY=1" in message for message in systemd.heard)
        systemd.wait("EXTEND_TIMEOUT_USEC=.*")
        systemd.wait("READY=1")
        assert client.call("server.health")["ready"]
        assert client.call("text.tokenize", {"text": "now"})["ids"]
    systemd.wait("STATUS=serving big")


def test_the_watchdog_is_fed_while_loading_idle_and_working(daemon, manager, tmp_path):
    systemd = manager(watchdog_s=1)
    one = daemon(ready=False, env=systemd.env, **big_dummy(tmp_path / "big"), **{"kv.device_bytes": "64MiB"})
    systemd.wait("WATCHDOG=1")
    assert "READY=1" not in systemd.heard
    systemd.wait("READY=1")
    assert systemd.listen(1.8).count("WATCHDOG=1") >= 2
    with one.connect() as client:
        generation = start_generation(client, max_tokens=2000)
        assert systemd.listen(1.8).count("WATCHDOG=1") >= 2
        generation.cancel()


class Frozen:
    """One thread of a process that does not run, while the others do. ptrace is what can do this."""
    ATTACH, DETACH = 16, 17

    def __init__(self, tid):
        self._tid, self._libc = tid, ctypes.CDLL(None, use_errno=True)

    def _ptrace(self, request):
        self._libc.ptrace.argtypes = [ctypes.c_long] * 4
        return self._libc.ptrace(request, self._tid, 0, 0)

    def __enter__(self):
        if self._ptrace(self.ATTACH) != 0:
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(self._tid, 0x40000000)  # __WALL

    def __exit__(self, *_):
        self._ptrace(self.DETACH)


def test_the_watchdog_is_not_fed_while_the_device_is_stuck(daemon, manager, backend):
    if backend != "cpu":
        pytest.skip("a card has no thread that can be frozen")
    systemd = manager(watchdog_s=2)
    one = daemon(env=systemd.env)
    with one.connect() as client:
        generation = start_generation(client, max_tokens=4000)
        with Frozen(thread_id(one.pid, "compute")):
            systemd.listen(3.5)
            assert "WATCHDOG=1" not in systemd.listen(2.5)
            health = client.call("server.health")
            assert not health["progressing"] and health["live"] and health["ready"]
        systemd.wait("WATCHDOG=1", 10)
        assert client.call("server.health")["progressing"]
        generation.cancel()
        assert generation.result()["finish_reason"] == "cancelled"


# ---- stop


def test_stop_lets_what_runs_finish_and_takes_nothing_new(daemon, manager):
    systemd = manager()
    one = daemon(env=systemd.env)
    with one.connect() as client, one.connect() as other:
        generation = start_generation(client, max_tokens=300)
        one.process.send_signal(signal.SIGTERM)
        systemd.wait("STOPPING=1")
        systemd.wait("STATUS=draining: 1 .*")
        with pytest.raises(spillway.ShuttingDown):
            other.complete(prompt="late")
        assert other.call("server.health")["phase"] == "draining"
        with pytest.raises(spillway.ConnectError):
            one.connect()
        result = generation.result()
        assert result["finish_reason"] == "length" and result["usage"]["completion"] == 300
    assert one.process.wait(timeout=60) == 0
    assert not os.path.exists(one.socket)


def test_stop_asks_for_the_time_that_draining_takes(daemon, manager):
    systemd = manager()
    one = daemon(env=systemd.env, **{"server.drain_timeout": "3s"})
    with one.connect() as client:
        generation = start_generation(client, max_tokens=100000, speculate=False)
        one.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        systemd.wait("STOPPING=1")
        for _ in range(2):
            assert int(systemd.wait(r"EXTEND_TIMEOUT_USEC=(\d+)", 10)[1]) >= 2_000_000
        assert generation.result()["finish_reason"] == "shutdown"
        assert 2.5 < time.monotonic() - began < 60
    assert one.process.wait(timeout=60) == 0


def test_a_second_sigterm_leaves_at_once(daemon):
    one = daemon()
    with one.connect() as client:
        start_generation(client, max_tokens=100000)
        one.process.send_signal(signal.SIGTERM)
        while client.call("server.health")["phase"] != "draining":
            time.sleep(0.01)
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(timeout=20) == 1
    assert not os.path.exists(one.socket)
    assert "event=exit.now" in one.log()
    one.process.returncode = 0  # as asked for


def test_a_daemon_that_is_stopped_while_loading_is_gone_at_once(daemon, manager, tmp_path):
    systemd = manager()
    one = daemon(ready=False, env=systemd.env, **big_dummy(tmp_path / "big", 32), **{"kv.device_bytes": "256MiB"})
    systemd.wait("STATUS=loading: .*")
    one.process.send_signal(signal.SIGTERM)
    systemd.wait("STOPPING=1")
    assert one.process.wait(timeout=5) == 0
    assert not os.path.exists(one.socket)
    assert "READY=1" not in systemd.heard


# ---- reload


def test_sighup_reads_the_file_again_and_says_so(daemon, manager, tmp_path):
    systemd, conf = manager(), tmp_path / "spillway.conf"
    conf.write_text("[log]\nlevel = info\n[sched]\nqueue_max = 7\n")
    one = daemon(env=systemd.env, args=("--config", str(conf)))
    systemd.wait("READY=1")
    conf.write_text("[log]\nlevel = warn\n[sched]\nqueue_max = 9\n")
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    one.process.send_signal(signal.SIGHUP)
    reloading_us = int(systemd.wait(r"RELOADING=1\nMONOTONIC_USEC=(\d+)")[1])
    assert before_us <= reloading_us <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    systemd.wait("READY=1")
    with one.connect() as client:
        values = client.call("server.config")["values"]
    assert values["log.level"]["value"] == "warn" and str(conf) in values["log.level"]["origin"]
    assert values["sched.queue_max"]["value"] == "9"


def test_sighup_before_anybody_listens_is_heard_later(spillwayd, tmp_path):
    """It waits already when the program begins, which is sooner than any signal from outside could come."""
    def send_self():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
        os.kill(os.getpid(), signal.SIGHUP)

    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([spillwayd, "--set", f"server.socket={tmp_path}/s"], stderr=log, preexec_fn=send_self)
    try:
        end = time.monotonic() + 60
        while "event=ready" not in (text := (tmp_path / "log").read_text()):
            assert process.poll() is None and time.monotonic() < end, text
            time.sleep(0.05)
        assert "event=reload.done" in text
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_a_bad_file_changes_nothing_and_the_daemon_goes_on(daemon, manager, tmp_path):
    systemd, conf = manager(), tmp_path / "spillway.conf"
    conf.write_text("[sched]\nqueue_max = 7\n")
    one = daemon(env=systemd.env, args=("--config", str(conf)))
    systemd.wait("READY=1")
    conf.write_text("[sched]\nqueue_max = 9\nqueue_mux = 10\n")
    one.process.send_signal(signal.SIGHUP)
    systemd.wait("RELOADING=1.*")
    systemd.wait("READY=1")
    assert f"{conf}:3" in one.log() and "event=reload.refused" in one.log()
    with one.connect() as client:
        assert client.call("server.config")["values"]["sched.queue_max"]["value"] == "7"
        with pytest.raises(spillway.BadParam, match="queue_mux"):
            client.call("server.reload")
        assert client.complete(prompt="Once", max_tokens=4)["finish_reason"]


def test_reloads_that_come_close_together_are_all_answered(daemon, tmp_path):
    conf = tmp_path / "spillway.conf"
    conf.write_text("")
    one = daemon(args=("--config", str(conf)))
    conf.write_text("[sched]\nqueue_max = 9\n[model]\nthreads = 3\n")
    with one.connect() as client:
        requests = [client._start("server.reload", {}) for _ in range(5)]
        one.process.send_signal(signal.SIGHUP)
        for request in requests:
            while not request.done:
                client._receive(request, 60)
        outcomes = [request.outcome() for request in requests]
        assert client.call("server.config")["values"]["sched.queue_max"]["value"] == "9"
    assert all(outcome["needs_restart"] == ["model.threads"] for outcome in outcomes)
    assert sum(outcome["changed"] == ["sched.queue_max"] for outcome in outcomes) <= 1  # the first, or the signal


# ---- sockets passed in


def test_a_socket_of_systemd_is_served_and_left_in_place(spillwayd, tmp_path):
    activate = shutil.which("systemd-socket-activate")
    assert activate, "systemd-socket-activate is missing: install the package systemd"
    path = tmp_path / "s"
    names = [name for name in os.environ if name.endswith("SAN_OPTIONS")]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([activate, "-l", path, *(word for name in names for word in ("-E", name)), spillwayd,
                                    "--set", "model.backend=cpu", "--set", "kv.device_bytes=128MiB"], stderr=log)
    try:
        end = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.01)
        with spillway.Client(path, connect_timeout=60, timeout=120) as client:  # this starts the daemon
            while not client.call("server.health")["ready"]:
                time.sleep(0.05)
            assert client.complete(prompt="Once", max_tokens=4)["usage"]["completion"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert path.exists(), "the socket belongs to the manager"
    finally:
        process.kill()
        process.wait()


def listening(path):
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one


def run_with_fds(spillwayd, tmp_path, fds, listen_fds=None, listen_pid="$$"):
    """With these descriptors as 3 and up, as a manager passes them."""
    moves = "".join(f" {3 + i}<&{fd.fileno()}" for i, fd in enumerate(fds))
    n = len(fds) if listen_fds is None else listen_fds
    script = f'LISTEN_PID="{listen_pid}" LISTEN_FDS="{n}" exec "$@"{moves}'
    return subprocess.run(["bash", "-c", script, "bash", spillwayd, "--set", f"server.socket={tmp_path}/own", "--set",
                           "model.path=/nonexistent"], pass_fds=[fd.fileno() for fd in fds], capture_output=True, text=True,
                          timeout=60)


def high(fd_object):
    """The same, with a number that is not in the way of those passed in."""
    number = fcntl.fcntl(fd_object.fileno(), fcntl.F_DUPFD_CLOEXEC, 60)
    fd_object.close()
    return socket.socket(fileno=number) if isinstance(fd_object, socket.socket) else os.fdopen(number, "rb", 0)


def test_what_is_passed_in_and_is_no_single_listening_stream_socket_is_refused(spillwayd, tmp_path):
    udp, tcp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()
    datagrams, silent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    tcp.bind(("127.0.0.1", 0))
    tcp.listen()
    datagrams.bind(str(tmp_path / "d"))
    silent.bind(str(tmp_path / "n"))
    two = [high(listening(tmp_path / "a")), high(listening(tmp_path / "b"))]
    cases = [
        (two, None, 78, "2 sockets"),
        ([], 1, 78, "descriptor 3"),
        ([], 99, 78, "LISTEN_FDS"),
        ([], "many", 78, "LISTEN_FDS"),
        ([high(udp)], None, 78, "is no Unix socket"),
        ([high(tcp)], None, 78, "is no Unix socket"),
        ([high(open("/dev/null", "rb", buffering=0))], None, 78, "is no Unix socket"),
        ([high(datagrams)], None, 78, "no stream socket"),
        ([high(silent)], None, 78, "does not listen"),
    ]
    for fds, n, status, words in cases:
        ended = run_with_fds(spillwayd, tmp_path, fds, n)
        assert ended.returncode == status and words in ended.stderr, (words, ended)
        for fd in fds:
            fd.close()


def test_a_socket_that_is_for_another_process_is_not_taken(spillwayd, tmp_path):
    ended = run_with_fds(spillwayd, tmp_path, [high(listening(tmp_path / "a"))], listen_pid="1")
    assert ended.returncode == 77 and f"socket={tmp_path}/own" in ended.stderr, ended


# ---- exit codes


def test_bad_configuration_is_78_and_names_the_place(spillwayd, tmp_path):
    conf = tmp_path / "spillway.conf"
    conf.write_text("[sched]\n\nmax_seqz = 3\n")
    ended = run(spillwayd, "--config", conf)
    assert ended.returncode == 78 and f"{conf}:3" in ended.stderr and "max_seqs" in ended.stderr
    ended = run(spillwayd, "--set", "sched.max_seqs=0")
    assert ended.returncode == 78 and "sched.max_seqs" in ended.stderr
    ended = run(spillwayd, env={"NOTIFY_SOCKET": "nonsense"})
    assert ended.returncode == 78 and "NOTIFY_SOCKET" in ended.stderr
    ended = run(spillwayd, env={"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "soon"})
    assert ended.returncode == 78 and "WATCHDOG_USEC" in ended.stderr


def test_a_model_or_device_that_cannot_be_used_is_77_and_says_why(spillwayd, manager, tmp_path):
    systemd = manager()
    sock = ("--set", f"server.socket={tmp_path}/s")
    ended = run(spillwayd, *sock, "--set", f"model.path={tmp_path}/none", env=systemd.env)
    assert ended.returncode == 77 and f"{tmp_path}/none" in ended.stderr
    systemd.wait(f"STATUS=cannot load: .*{tmp_path}/none.*", 5)
    assert not os.path.exists(tmp_path / "s")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text("{")
    ended = run(spillwayd, *sock, "--set", f"model.path={tmp_path}/bad")
    assert ended.returncode == 77 and "config.json" in ended.stderr
    ended = run(spillwayd, *sock, "--set", "model.backend=cpu", "--set", "kv.device_bytes=1MiB")
    assert ended.returncode == 77 and "kv.device_bytes" in ended.stderr
    if not os.path.exists("/dev/nvidiactl"):
        ended = run(spillwayd, *sock, "--set", "model.backend=cuda")
        assert ended.returncode == 77 and "cuda" in ended.stderr


def test_a_socket_in_use_is_1_and_is_left_alone(daemon, spillwayd):
    one = daemon()
    ended = run(spillwayd, "--set", f"server.socket={one.socket}")
    assert ended.returncode == 1 and one.socket in ended.stderr
    with one.connect() as client:
        assert client.call("server.health")["ready"]
