"""One spillwayd process on a socket of its own."""
import os
import signal
import subprocess
import time

import spillway

READY_S = 120  # sanitizers on a loaded machine are slow
REPLY_S = 1800  # and read a document of 8k tokens for many minutes; the test has a limit of its own


class Daemon:
    def __init__(self, program, folder, settings, args, env):
        self.socket = str(folder / "s")
        self.status = 0  # that it is to end with
        self.log_path = folder / "log"
        settings = {"server.socket": self.socket, "kv.device_bytes": "128MiB", **settings}
        command = [program, *args]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=env)

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return self.log_path.read_text()

    def connect(self, **options):
        return spillway.Client(self.socket, **{"timeout": REPLY_S, **options})

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, f"the daemon ended at its start:\n{self.log()}"
            assert time.monotonic() < end, f"the daemon is not ready after {READY_S} s:\n{self.log()}"
            try:
                with self.connect() as client:
                    if client.call("server.health")["ready"]:
                        return
            except (spillway.ConnectError, spillway.ConnectionLost):
                pass
            time.sleep(0.05)

    def metrics(self):
        """Name with labels -> number."""
        with self.connect() as client:
            text = client.call("server.metrics")["text"]
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def rss_bytes(self):
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def has_sanitizer(self):
        with open(f"/proc/{self.pid}/maps") as maps:
            text = maps.read()
        return "libasan" in text or "libtsan" in text

    def n_fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self, status=0):
        self.status = status
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the daemon does not stop:\n{self.log()}")
        assert code == status, f"exit status {code}:\n{self.log()}"
