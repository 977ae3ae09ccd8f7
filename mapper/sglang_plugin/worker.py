"""One worker: the stock SGLang server with the flags that Baton needs, watched and stopped cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from mapper.errors import MapperError
from mapper.spec import ModelSpec, read_spec

# SGLang answers SIGTERM within about 8 seconds; after this it is killed.
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker runs and where; sizes in tokens and bytes.

    `kv_tokens` bounds the KV pool. `memory_fraction` is SGLang's `--mem-fraction-static`;
    several workers on one machine need room beside each other.
    """

    model_path: Path
    name: str
    port: int
    store: Path
    store_bytes: int
    host: str = "127.0.0.1"
    dtype: str = "float32"
    page_size: int = 16
    kv_tokens: int = 16384
    memory_fraction: float = 0.3
    max_running: int = 16
    threads: int | None = None
    extra_flags: tuple[str, ...] = field(default=())

    def spec(self) -> ModelSpec:
        return read_spec(
            self.model_path, name=self.name, kv_dtype=self.dtype, page_size=self.page_size
        )

    def flags(self) -> list[str]:
        """SGLang's command line."""
        linker = {
            "linker": "BatonLinker",
            "linker_module_path": "mapper.sglang_plugin.linker",
            "linker_extra_config": {
                "store": str(self.store),
                "max_bytes": self.store_bytes,
                "spec": self.spec().model_dump(mode="json"),
            },
        }
        options = {
            "--model-path": self.model_path,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--page-size": self.page_size,
            "--max-total-tokens": self.kv_tokens,
            "--mem-fraction-static": self.memory_fraction,
            "--max-running-requests": self.max_running,
            "--default-priority-value": 0,
            "--unified-cache-external-linker-backend": "dynamic",
            "--unified-cache-external-linker-config": json.dumps(linker),
        }
        switches = [
            "--enable-cache-report",
            "--enable-metrics",
            "--enable-priority-scheduling",
            "--enable-unified-cache-external-linker",
            "--skip-server-warmup",
        ]
        values = [str(part) for option in options.items() for part in option]
        return [*values, *switches, *self.extra_flags]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Worker:
    """A running SGLang server process.

    Args:
        config: what to run.
        log: file that receives the server's output.
    """

    def __init__(self, config: WorkerConfig, log: Path) -> None:
        self.config = config
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        # With the default active waiting, decoding falls to a token a second as soon as
        # any other process is busy.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        if config.threads:
            environment["OMP_NUM_THREADS"] = str(config.threads)
        # SGLang imports some 5,000 files; without their bytecode a start takes 3 times as long.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["HF_HUB_OFFLINE"] = "1"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mapper.sglang_plugin.serve", *config.flags()],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                # Its own group: the launcher decides when and how it stops, not Ctrl-C.
                start_new_session=True,
            )

    def wait_ready(
        self, timeout: float = 300.0, progress: Callable[[str], None] | None = None
    ) -> float:
        """Seconds until `/health` answered 200.

        Raises:
            MapperError: the server ended, or did not become healthy in time; the message
                quotes the end of its log.
        """
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < timeout:
            if self.process.poll() is not None:
                raise MapperError(
                    f"{self.config.name}: SGLang ended with {self.process.returncode} while "
                    f"starting; the end of {self.log}:\n{self.log_tail()}"
                )
            if self.healthy():
                return elapsed
            if progress:
                progress(self.log_tail(1))
            time.sleep(0.25)
        raise MapperError(
            f"{self.config.name}: not healthy after {timeout:.0f} s; see {self.log}:\n"
            f"{self.log_tail()}"
        )

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.config.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def log_tail(self, lines: int = 15) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])

    def stop(self) -> int:
        """Stops the server and its children; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()
