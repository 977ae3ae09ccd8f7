"""A request rate per tenant, counted in Redis so that it holds across gateways."""

from __future__ import annotations

import asyncio
import math
import time

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from router import log
from router.errors import ApiError
from router.metrics import Metrics
from router.redis_pool import FailFast, RedisDown, connect

logger = log.get("admission")
_CONNECTIONS = 16


class RateLimit:
    def __init__(
        self, rate: str, redis_url: str, password: str | None, timeout: float, metrics: Metrics
    ) -> None:
        self._item: RateLimitItem = parse(rate)
        self._timeout = timeout
        self._metrics = metrics
        self._fail_fast = FailFast(self._failed)
        self._redis = None
        if redis_url.startswith("memory:"):
            storage = MemoryStorage()
        else:
            self._redis = connect(redis_url, password, connections=_CONNECTIONS, timeout=timeout)
            storage = RedisStorage(
                # Where to connect is the pool's affair.
                "async+redis://",
                implementation="redispy",
                key_prefix="baton:rate",
                connection_pool=self._redis.connection_pool,
            )
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def hit(self, tenant: str) -> None:
        try:
            with self._fail_fast.call("rate"):
                async with asyncio.timeout(self._timeout):
                    if await self._limiter.hit(self._item, tenant):
                        return
                    window = await self._limiter.get_window_stats(self._item, tenant)
        except RedisDown:
            # Without Redis nobody is turned away: answering goes before counting.
            return
        self._metrics.rejected.labels("rate").inc()
        wait = max(1, math.ceil(window.reset_time - time.time()))
        raise ApiError(
            429,
            "The request rate of this key's tenant is used up.",
            code="rate_limit_exceeded",
            headers={"retry-after": str(wait)},
        )

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    def _failed(self, operation: str, error: Exception) -> None:
        self._metrics.store_errors.labels(operation).inc()
        logger.warning("rate_limit_unavailable", error=type(error).__name__)
