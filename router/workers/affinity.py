"""Rendezvous hashing with a load bound: sessions stay where their cache is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar


class Loaded(Protocol):
    name: str
    in_flight: int


W = TypeVar("W", bound=Loaded)


def rank(key: str, workers: Sequence[W]) -> list[W]:
    """All workers, the session's own first. Adding or losing one moves only its sessions."""
    return sorted(workers, key=lambda worker: _score(key, worker.name), reverse=True)


def choose(key: str, workers: Sequence[W], bound: float) -> W:
    """The first worker in the session's order that is not over its share of the load."""
    ordered = rank(key, workers)
    total = sum(worker.in_flight for worker in ordered) + 1
    capacity = math.ceil(bound * total / len(ordered))
    return next((worker for worker in ordered if worker.in_flight < capacity), ordered[0])


def _score(key: str, name: str) -> bytes:
    return blake2b(f"{name}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
