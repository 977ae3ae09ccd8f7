"""Spending counted in Redis for all gateways together; without it, by this process alone."""

from __future__ import annotations

import asyncio
import hashlib
import time

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from policies import Spent
from router import log
from router.budgets.base import plus, today
from router.budgets.memory import MemoryLedger
from router.metrics import Metrics

logger = log.get("budgets")
_PAUSE_SECONDS = 1.0
_KEEP_SECONDS = 2 * 24 * 3600
_CONNECTIONS = 16


class RedisLedger:
    """While Redis is away this process goes on from what it last read.

    What is spent meanwhile is kept, and added in Redis with the first turn after.
    """

    def __init__(self, url: str, password: str | None, timeout: float, metrics: Metrics) -> None:
        self._metrics = metrics
        self._timeout = timeout
        self._down_until = 0.0
        self._last_read = MemoryLedger()
        self._owed = MemoryLedger()
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout,
            password=password,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 1),
            protocol=2,
        )
        self._redis = redis.Redis.from_pool(pool)

    async def spent(self, tenant: str) -> Spent:
        try:
            money, tokens = await self._call(
                self._redis.hmget(_key(tenant), "money", "large_tokens")
            )
        except _Down:
            return plus(await self._last_read.spent(tenant), await self._owed.spent(tenant))
        spent = Spent(money=float(money or 0), large_tokens=int(tokens or 0))
        await self._last_read.set(tenant, spent)
        return plus(spent, await self._owed.spent(tenant))

    async def add(self, tenant: str, spent: Spent) -> None:
        total = plus(spent, await self._owed.take(tenant))
        key = _key(tenant)
        pipe = self._redis.pipeline(transaction=True)
        pipe.hincrbyfloat(key, "money", total.money)
        pipe.hincrby(key, "large_tokens", total.large_tokens)
        pipe.expire(key, _KEEP_SECONDS)
        try:
            await self._call(pipe.execute())
        except _Down:
            await self._owed.add(tenant, total)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(self, call):  # type: ignore[no-untyped-def]
        if time.monotonic() < self._down_until:
            call.close()
            raise _Down
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            self._down_until = time.monotonic() + _PAUSE_SECONDS
            self._metrics.store_errors.labels("spend").inc()
            logger.warning("ledger_unavailable", error=type(error).__name__)
            raise _Down from error


class _Down(Exception):
    pass


def _key(tenant: str) -> str:
    return f"baton:v1:spend:{hashlib.sha256(tenant.encode()).hexdigest()}:{today()}"
