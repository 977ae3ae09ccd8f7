"""Spending counted in Redis for all gateways together; without it, by this process alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets

from pydantic import ValidationError

from policies import Spent
from router import log
from router.budgets.base import plus, today
from router.budgets.memory import MemoryLedger
from router.metrics import Metrics
from router.redis_pool import FailFast, RedisDown, connect

logger = log.get("budgets")
_KEEP_SECONDS = 2 * 24 * 3600
_CONNECTIONS = 16


class RedisLedger:
    """Each process keeps its own total in Redis, under a name of its own; the sum is what counts.

    A total that is written twice does no harm, so that a write without an answer needs no
    care. While Redis is away the others' totals are what they last were.
    """

    def __init__(self, url: str, password: str | None, timeout: float, metrics: Metrics) -> None:
        self._metrics = metrics
        self._timeout = timeout
        self._name = secrets.token_hex(6)
        self._own = MemoryLedger()
        self._others = MemoryLedger()
        self._fail_fast = FailFast(self._failed)
        self._redis = connect(url, password, connections=_CONNECTIONS, timeout=timeout)

    async def spent(self, tenant: str) -> Spent:
        with contextlib.suppress(RedisDown):
            with self._fail_fast.call("spend"):
                async with asyncio.timeout(self._timeout):
                    totals = await self._redis.hgetall(_key(tenant))
            others = Spent()
            for name, total in totals.items():
                if name.decode() != self._name:
                    others = plus(others, _parse(total))
            await self._others.set(tenant, others)
        return plus(await self._others.spent(tenant), await self._own.spent(tenant))

    async def add(self, tenant: str, spent: Spent) -> None:
        await self._own.add(tenant, spent)
        total = await self._own.spent(tenant)
        key = _key(tenant)
        pipe = self._redis.pipeline(transaction=True)
        # Of two turns that end at once the earlier total may be written last; the next turn
        # puts that right.
        pipe.hset(key, self._name, total.model_dump_json())
        pipe.expire(key, _KEEP_SECONDS)
        with contextlib.suppress(RedisDown), self._fail_fast.call("spend"):
            async with asyncio.timeout(self._timeout):
                await pipe.execute()

    async def close(self) -> None:
        await self._redis.aclose()

    def _failed(self, operation: str, error: Exception) -> None:
        self._metrics.store_errors.labels(operation).inc()
        logger.warning("ledger_unavailable", error=type(error).__name__)


def _parse(total: bytes) -> Spent:
    try:
        return Spent.model_validate_json(total)
    except ValidationError:
        logger.warning("ledger_unreadable")
        return Spent()


def _key(tenant: str) -> str:
    return f"baton:v1:spend:{hashlib.sha256(tenant.encode()).hexdigest()}:{today()}"
