"""Which pairs of models the mapper can map, and what its quality cards say of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, get_args

import httpx
from pydantic import BaseModel, ValidationError

from policies.base import Task
from router import log
from router.transfer.client import MapperClient

logger = log.get("transfer")
_LOOK_SECONDS = 30.0
_TIMEOUT_SECONDS = 5.0


class Pair(BaseModel):
    source: str
    target: str
    status: str
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
        return by_class(pair.quality)

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


def by_class(card: Mapping[str, Any]) -> dict[str, float]:
    """What a quality card says that the map keeps of each class, within 0 and 1."""
    found = card.get("retention")
    return {
        task: min(max(float(value), 0.0), 1.0)
        for task, value in (found.items() if isinstance(found, dict) else ())
        if task in get_args(Task) and isinstance(value, int | float) and math.isfinite(value)
    }
