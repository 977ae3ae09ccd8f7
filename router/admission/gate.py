"""A tier's concurrency limit with a bounded queue that is fair between tenants."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.errors import ApiError
from router.metrics import Metrics


class Gate:
    """At most `limit` turns at once and `queue` waiting; tenants take turns at the door."""

    def __init__(
        self, tier: str, limit: int, per_tenant: int, queue: int, seconds: float, metrics: Metrics
    ) -> None:
        self._tier = tier
        self._limit = limit
        self._per_tenant = per_tenant
        self._queue = queue
        self._seconds = seconds
        self._metrics = metrics
        self._running: dict[str, int] = {}
        # The tenant at the front is the next to be served, and then goes to the back.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.in_flight = 0

    @property
    def queued(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    async def _acquire(self, tenant: str) -> None:
        if self._free(tenant) and not self._waiting:
            self._admit(tenant)
            return
        self._make_room(tenant)
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(ticket)
        # Others may wait only because their tenants are at their own limits.
        self._wake()
        try:
            async with asyncio.timeout(self._seconds):
                await ticket
        except BaseException as error:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._release(tenant)
            else:
                self._leave(tenant, ticket)
            if isinstance(error, TimeoutError):
                raise self._refused("queue_timeout", "Waited too long for a free slot.") from None
            raise

    def _make_room(self, tenant: str) -> None:
        """A full queue refuses whoever has most in it: the newcomer, or the longest line's last."""
        if self.queued < self._queue:
            return
        mine = len(self._waiting.get(tenant, ()))
        other = max(self._waiting, key=lambda name: len(self._waiting[name]), default=None)
        if other is None or len(self._waiting[other]) <= mine + 1:
            raise self._refused("queue_full", "Too many requests are waiting.")
        evicted = self._waiting[other].pop()
        evicted.set_exception(self._refused("queue_full", "Too many requests are waiting."))

    def _free(self, tenant: str) -> bool:
        return self.in_flight < self._limit and self._running.get(tenant, 0) < self._per_tenant

    def _admit(self, tenant: str) -> None:
        self.in_flight += 1
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def _release(self, tenant: str) -> None:
        self.in_flight -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._wake()

    def _wake(self) -> None:
        for tenant in list(self._waiting):
            if self.in_flight >= self._limit:
                return
            if not self._free(tenant):
                continue
            line = self._waiting[tenant]
            ticket = line.popleft()
            self._waiting.move_to_end(tenant)
            if not line:
                del self._waiting[tenant]
            self._admit(tenant)
            ticket.set_result(None)

    def _leave(self, tenant: str, ticket: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._waiting[tenant]

    def _refused(self, reason: str, message: str) -> ApiError:
        self._metrics.rejected.labels(reason).inc()
        return ApiError(429, message, code=reason, headers={"retry-after": "1"})

    def observe(self) -> None:
        self._metrics.in_flight.labels(self._tier).set(self.in_flight)
        self._metrics.queued.labels(self._tier).set(self.queued)
