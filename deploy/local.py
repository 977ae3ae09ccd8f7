"""Everything on one machine: redis-server, two SGLang workers, the mapper and the gateway.

The same processes as in production, started in order, watched, and stopped together.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import redis
import yaml

from mapper.demo import model_name
from mapper.sglang_plugin.worker import Worker, WorkerConfig

Progress = Callable[[str], None]


class LocalError(RuntimeError):
    """A part of the local stack did not start; the message says what to do."""


@dataclass(frozen=True)
class LocalConfig:
    """What to start and where; every socket binds loopback.

    `folder` receives logs and the generated gateway configuration. `models` and
    `artifacts` are folders. `gateway` is merged over the generated configuration.
    """

    folder: Path
    models: dict[str, Path]
    artifacts: Sequence[Path]
    policy: dict[str, Any]
    base_port: int = 8080
    store: Path | None = None
    store_bytes: int = 2 << 30
    gateway: dict[str, Any] = field(default_factory=dict)

    @property
    def store_folder(self) -> Path:
        if self.store:
            return self.store
        shared = Path("/dev/shm")
        parent = shared if shared.is_dir() else self.folder
        return parent / f"baton-{os.getuid()}-{self.base_port}"

    @property
    def ports(self) -> dict[str, int]:
        names = ("gateway", "mapper", "redis", "small", "large")
        return {name: self.base_port + offset for offset, name in enumerate(names)}

    def url(self, part: str) -> str:
        return f"http://127.0.0.1:{self.ports[part]}"

    def worker(self, tier: str) -> WorkerConfig:
        return WorkerConfig(
            model_path=self.models[tier],
            name=model_name(tier),
            port=self.ports[tier],
            store=self.store_folder,
            store_bytes=self.store_bytes,
            # Without a parser SGLang answers a forced tool call as plain text.
            extra_flags=("--tool-call-parser", "hermes"),
        )


class LocalStack:
    """A context manager that runs the stack; leaving it stops every process it started.

    Raises:
        LocalError: a part is missing or did not become healthy; what had started is stopped.
    """

    def __init__(self, config: LocalConfig, progress: Progress = lambda message: None) -> None:
        self.config = config
        self._progress = progress
        self.workers: dict[str, Worker] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.config.folder.mkdir(parents=True, exist_ok=True)
            self.start_redis()
            for tier in self.config.models:
                self.start_worker(tier)
            self.start_mapper()
            for tier, worker in self.workers.items():
                self._progress(f"{tier} worker: importing SGLang and loading the model")
                worker.wait_ready()
            self.start_gateway()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- parts; each can be stopped and started again on its own ----

    def start_redis(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise LocalError(
                "redis-server is not installed; on Debian: apt-get install redis-server"
            )
        self._progress("redis-server")
        port = self.config.ports["redis"]
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._start("redis", [binary, "--port", str(port), *options])
        client = redis.Redis(port=port)
        self._wait("redis", lambda: bool(client.ping()), 15)

    def start_worker(self, tier: str) -> Worker:
        worker = Worker(self.config.worker(tier), self.config.folder / f"{tier}.log")
        self.workers[tier] = worker
        return worker

    def start_mapper(self) -> None:
        self._progress("mapper: verifying artifacts")
        command = [
            "mapper",
            f"--store={self.config.store_folder}",
            f"--store-bytes={self.config.store_bytes}",
            f"--listen=127.0.0.1:{self.config.ports['mapper']}",
        ]
        artifacts = [f"--artifact={folder}" for folder in self.config.artifacts]
        self._start("mapper", [*_BATON, *command, *artifacts])
        self._wait("mapper", self._answers("mapper", "/health"), 120)

    def start_gateway(self) -> None:
        self._progress("gateway")
        file = self.config.folder / "gateway.yaml"
        file.write_text(yaml.safe_dump(self.gateway_settings(), sort_keys=False))
        self._start("gateway", [*_BATON, "serve", f"--config={file}"])
        self._wait("gateway", self._answers("gateway", "/health"), 60)

    def gateway_settings(self) -> dict[str, Any]:
        settings = {
            "host": "127.0.0.1",
            "port": self.config.ports["gateway"],
            "redis_url": f"redis://127.0.0.1:{self.config.ports['redis']}/0",
            "mapper_url": self.config.url("mapper"),
            "policy": self.config.policy,
            # On a CPU the prefill that a transfer replaces takes many seconds.
            "transfers": {"deadline_ms": 10_000},
            # A user who comes waits for the audit's piece that is running: some 0.1 s of so many.
            "drift": {"audit_piece_tokens": 32},
            "workers": [
                {
                    "name": tier,
                    "tier": tier,
                    "url": self.config.url(tier),
                    "model": self.config.worker(tier).name,
                }
                for tier in self.config.models
            ],
        }
        return settings | self.config.gateway

    def stop_part(self, name: str) -> None:
        if name in self.workers:
            self.workers.pop(name).stop()
            return
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        # Gateway first, so that no request meets a worker that is going away.
        for name in reversed([*self.processes]):
            self.stop_part(name)
        workers, self.workers = self.workers, {}
        for worker in workers.values():
            # All at once: each takes some seconds.
            worker.process.send_signal(signal.SIGTERM)
        for worker in workers.values():
            worker.stop()
        shutil.rmtree(self.config.store_folder, ignore_errors=True)

    def wait(self) -> str:
        """Blocks until a part ends by itself; returns its name."""
        while True:
            running = self.processes | {tier: w.process for tier, w in self.workers.items()}
            for name, process in running.items():
                if process.poll() is not None:
                    return name
            time.sleep(0.5)

    # ---- inside ----

    def _start(self, name: str, command: list[str]) -> None:
        log = self.config.folder / f"{name}.log"
        with log.open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.config.folder,
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )

    def _answers(self, part: str, path: str) -> Callable[[], bool]:
        def ask() -> bool:
            return httpx.get(self.config.url(part) + path, timeout=5).status_code == 200

        return ask

    def _wait(self, name: str, ready: Callable[[], bool], seconds: float) -> None:
        log = self.config.folder / f"{name}.log"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.processes[name].poll() is not None:
                break
            try:
                if ready():
                    return
            except (httpx.HTTPError, redis.ConnectionError):
                pass
            time.sleep(0.1)
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-15:])
        raise LocalError(f"{name} did not start; the end of {log}:\n{tail}")


_BATON = [sys.executable, "-m", "router.cli"]
