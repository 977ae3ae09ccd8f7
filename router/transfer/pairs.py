"""Which pairs of models the mapper can map, and what its quality cards say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from router import log
from router.transfer.client import MapperClient

logger = log.get("transfer")
_LOOK_SECONDS = 30.0
_TIMEOUT_SECONDS = 5.0
# Measured tasks by the class of turns that they stand for; all others are talk.
_CLASSES = {"squad": "quote", "gsm8k": "math", "humaneval": "code", "mbpp": "code"}


class Pair(BaseModel):
    source: str
    target: str
    status: str
    artifact: str | None = None
    quality: dict[str, Any] | None = None


class Pairs:
    """As the mapper last said. Until it has said something every pair counts as mapped."""

    def __init__(self, client: MapperClient | None) -> None:
        self._client = client
        self._pairs: dict[tuple[str, str], Pair] | None = None

    def ready(self, source: str, target: str) -> bool:
        if self._pairs is None:
            return True
        pair = self._pairs.get((source, target))
        return pair is not None and pair.status == "ready"

    def retention(self, source: str | None, target: str) -> dict[str, float]:
        """Share of native quality that the map keeps, by task class; empty when not measured."""
        pair = (self._pairs or {}).get((source or "", target))
        if pair is None or pair.quality is None:
            return {}
        return by_class(pair.quality, Path(pair.artifact or "").name)

    async def watch(self) -> None:
        while self._client is not None:
            await self.refresh()
            await asyncio.sleep(_LOOK_SECONDS)

    async def refresh(self) -> None:
        try:
            found = [Pair.model_validate(one) for one in await self._client.pairs(_TIMEOUT_SECONDS)]
        except (httpx.HTTPError, ValidationError, ValueError, TypeError):
            # A mapper that is away is noticed by the transfers themselves.
            return
        self._pairs = {(pair.source, pair.target): pair for pair in found}


def by_class(quality: Mapping[str, Any], artifact: str) -> dict[str, float]:
    """The lowest retention of a class's tasks, within 0 and 1."""
    found: dict[str, float] = {}
    tasks = quality.get("tasks")
    for task, summary in tasks.items() if isinstance(tasks, dict) else ():
        one = summary.get(artifact) if isinstance(summary, dict) else None
        value = one.get("retention") if isinstance(one, dict) else None
        if isinstance(value, int | float):
            name = _CLASSES.get(task, "chat")
            found[name] = min(found.get(name, 1.0), max(0.0, float(value)))
    return found
