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
from router.redis_pool import FailFast, RedisDown

logger = log.get("admission")


class RateLimit:
    def __init__(
        self, rate: str, redis_url: str, password: str | None, timeout: float, metrics: Metrics
    ) -> None:
        self._item: RateLimitItem = parse(rate)
        self._timeout = timeout
        self._metrics = metrics
        self._fail_fast = FailFast(self._failed)
        if redis_url.startswith("memory:"):
            storage = MemoryStorage()
        else:
            options = {"password": password} if password else {}
            storage = RedisStorage(
                f"async+{redis_url}",
                implementation="redispy",
                key_prefix="baton:rate",
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                protocol=2,
                **options,
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

    def _failed(self, operation: str, error: Exception) -> None:
        self._metrics.store_errors.labels(operation).inc()
        logger.warning("rate_limit_unavailable", error=type(error).__name__)
