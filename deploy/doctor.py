"""`baton doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from mapper.demo.artifacts import cached_artifacts
from mapper.demo.models import cached_models
from mapper.errors import BadArtifact

_SHARED = Path("/dev/shm")
# Two workers with 16,384 tokens of fp32 KV, the mapper and the page store.
_MEMORY_BYTES = 8 << 30
_STORE_BYTES = 2 << 30
SGLANG = "0.5.23"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `remedy` says what to do where `ok` is false."""

    name: str
    ok: bool
    found: str
    remedy: str | None = None


def report() -> dict[str, Any]:
    """All checks and the demo's folders, as `baton doctor --json` prints them."""
    checks = list(run())
    return {
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "models": {tier: str(folder) for tier, folder in cached_models().items()},
        "artifacts": {way: str(folder) for way, folder in cached_artifacts().items()},
    }


def run() -> Iterator[Check]:
    yield Check(
        "python",
        sys.version_info >= (3, 11),
        sys.version.split()[0],
        "install Python 3.11 or newer and run `make setup`",
    )
    yield _package("sglang", SGLANG, "make setup")
    yield from _torch()
    yield _program(
        "redis-server", "apt-get install redis-server; without it, use redis_url: memory://"
    )
    yield _program("g++", "apt-get install g++; SGLang compiles its page-key hash at first start")
    yield Check(
        "openssl headers",
        Path("/usr/include/openssl/evp.h").exists(),
        "/usr/include/openssl",
        "apt-get install libssl-dev",
    )
    yield _platform_plugin()
    yield _memory()
    yield _store()
    for tier, folder in cached_models().items():
        yield Check(f"{tier} demo model", folder.is_dir(), str(folder), "make demo builds it")
    for way, folder in cached_artifacts().items():
        yield _artifact(way, folder)


def _package(name: str, wanted: str, remedy: str) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed", remedy)
    return Check(name, found == wanted, found, f"Baton is tried with {wanted}; {remedy}")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch", False, str(error), "make setup")
        return
    yield Check("torch", True, torch.__version__)
    if torch.cuda.is_available():
        yield Check("accelerator", True, torch.cuda.get_device_name())
        return
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    widest = next((f for f in ("amx_tile", "avx512f", "avx2") if f in flags), None)
    yield Check(
        "accelerator",
        widest is not None,
        f"none; {os.cpu_count()} CPU cores with {widest or 'no wide vectors'}",
        "prefill will be slow without AVX2; the demo still runs",
    )


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _program(name: str, remedy: str) -> Check:
    path = shutil.which(name)
    return Check(name, path is not None, path or "not found", remedy)


def _platform_plugin() -> Check:
    entries = importlib.metadata.entry_points(group="sglang.srt.platforms")
    names = [entry.name for entry in entries]
    return Check(
        "SGLang platform plugin",
        "baton_cpu" in names,
        ", ".join(names) or "none",
        "pip install --no-deps -e . (make setup does it)",
    )


def _memory() -> Check:
    free = psutil.virtual_memory().available
    remedy = "close other programs, or give the workers fewer --kv-tokens"
    return Check("memory", free >= _MEMORY_BYTES, f"{free / 2**30:.1f} GiB available", remedy)


def _store() -> Check:
    if not _SHARED.is_dir():
        return Check("page store", False, "no /dev/shm", "pass --store a directory on tmpfs")
    free = shutil.disk_usage(_SHARED).free
    found = f"{free / 2**30:.1f} GiB free in {_SHARED}"
    remedy = "remount /dev/shm larger, or pass a smaller --store-bytes"
    return Check("page store", free >= _STORE_BYTES and os.access(_SHARED, os.W_OK), found, remedy)


def _artifact(way: str, folder: Path) -> Check:
    from mapper.artifact import Artifact

    try:
        Artifact.load(folder)
    except BadArtifact as error:
        return Check(f"{way} artifact", False, str(error), "make demo makes it")
    return Check(f"{way} artifact", True, str(folder))
