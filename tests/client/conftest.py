"""The fake daemon, the Python module under test, and the program under test (--spillway)."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fake"), str(ROOT / "client" / "python")]

from fake_spillwayd import FakeServer  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--spillway", help="the program spillway")
    parser.addoption("--daemon", help="the program spillwayd")
    parser.addoption("--probe", help="the program spillway-probe")
    parser.addoption("--example", help="the program of client/example.c")


@pytest.fixture
def server(tmp_path):
    with FakeServer(tmp_path / "spillway.sock") as fake:
        yield fake


class Run:
    """What a run of the program left."""

    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def json(self):
        return json.loads(self.out)


@pytest.fixture
def spillway(request, server):
    """Runs spillway against the fake daemon."""
    def run(*args, stdin="", **options):
        command = [request.config.getoption("--spillway"), "--socket", server.path, *map(str, args)]
        return Run(subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, check=False, **options))
    return run
