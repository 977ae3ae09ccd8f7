"""A real Redis on a loopback port, to be stopped, frozen and filled."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import redis


class RedisServer:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.mkdtemp(prefix="redis-test-")
        self._process: subprocess.Popen | None = None

    def start(self) -> RedisServer:
        # Persisted at a stop, so that a restarted server has what it had.
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder]
        arguments += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._process = subprocess.Popen(
            ["redis-server", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                if self.client().ping():
                    return self
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2, protocol=2)

    def stop(self) -> None:
        if self._process is not None:
            self.freeze(False)
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def freeze(self, frozen: bool = True) -> None:
        os.kill(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
