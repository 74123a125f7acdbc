"""The real daemon, started by tests that talk to it over its socket."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/golden")]

import spillway  # noqa: E402
from harness import Daemon  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--spillwayd", required=True, help="the program under test")
    parser.addoption("--spillway", help="the command-line client")
    parser.addoption("--backend", default="cpu", help="model.backend of the daemons")
    parser.addoption("--soak", type=int, help="seconds of test_soak.py")
    parser.addoption("--spillway-bench", help="the benchmarks")
    parser.addoption("--spillwayd-calls", help="the daemon with tests/fake/cuda_calls.c")
    parser.addoption("--coarse-disk", help="tests/fake/coarse_disk.c")
    parser.addoption("--long", action="store_true", help="also what takes minutes")


@pytest.fixture(scope="session")
def long(request):
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("--backend")


def daemons(request, folder_of_all):
    started = []
    usual = os.path.abspath(request.config.getoption("--spillwayd"))  # a test may change the folder
    backend = request.config.getoption("--backend")

    def start(ready=True, args=(), env=None, program=usual, **settings):
        folder = folder_of_all / str(len(started))
        folder.mkdir()
        one = Daemon(os.path.abspath(program), folder, {"model.backend": backend, **settings}, args, {**os.environ, **(env or {})})
        started.append(one)
        if ready:
            one.wait_ready()
        return one

    yield start
    for one in started:
        one.stop(one.status)


@pytest.fixture
def daemon(request, tmp_path):
    """daemon(**{"sched.max_seqs": 4}) starts one and waits until it serves; it must stop cleanly at the end."""
    yield from daemons(request, tmp_path)


@pytest.fixture(scope="module")
def kept_daemon(request, tmp_path_factory):
    """The same, for what several cases of a file need."""
    yield from daemons(request, tmp_path_factory.mktemp("kept"))


@pytest.fixture
def other_user(monkeypatch):
    """other_user(daemon): a connection that belongs to another uid."""
    if os.getuid() != 0:
        pytest.skip("needs two users, so the first must be root")
    opened = []

    def connect(one):
        folder, name = os.path.split(one.socket)
        monkeypatch.chdir(folder) # the folders above are closed to others
        os.seteuid(65534)
        try:
            opened.append(spillway.Client(name, timeout=300.0))
        finally:
            os.seteuid(0)
        return opened[-1]

    yield connect
    for client in opened:
        client.close()
