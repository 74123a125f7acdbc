"""A service manager as the daemon sees one: the socket that it notifies, and the variables it is started with."""
import os
import re
import socket
import time

import pytest


class Manager:
    def __init__(self, path, watchdog_s=None):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.env = {"NOTIFY_SOCKET": str(path)}
        if watchdog_s:
            self.env["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        self.heard = []  # all messages, in order

    def _receive(self, end):
        self._socket.settimeout(max(1e-3, end - time.monotonic()))
        try:
            self.heard.append(self._socket.recv(4096).decode())
        except TimeoutError:
            return None
        return self.heard[-1]

    def wait(self, pattern, seconds=120):
        """The next message that the whole pattern matches, as a match."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message = self._receive(end)
            match = re.fullmatch(pattern, message, re.DOTALL) if message is not None else None
            if match:
                return match
        raise AssertionError(f"no {pattern} within {seconds} s; heard {self.heard}")

    def listen(self, seconds):
        """What comes in this time."""
        end, n = time.monotonic() + seconds, len(self.heard)
        while time.monotonic() < end:
            self._receive(end)
        return self.heard[n:]

    def close(self):
        self._socket.close()


@pytest.fixture
def manager(tmp_path):
    """manager(watchdog_s=2)"""
    opened = []

    def start(**options):
        opened.append(Manager(tmp_path / f"notify{len(opened)}", **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def thread_id(pid, name):
    """Of the one thread of a process that has this name."""
    tids = [int(tid) for tid in os.listdir(f"/proc/{pid}/task") if
            open(f"/proc/{pid}/task/{tid}/comm").read().strip() == name]
    assert len(tids) == 1, f"{len(tids)} threads of {pid} are called {name}"
    return tids[0]
