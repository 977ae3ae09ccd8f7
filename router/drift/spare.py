"""Worker time that no user needs: waited for, taken a piece at a time and with rests, given back at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.drift import probe
from router.drift.metrics import DriftMetrics
from router.drift.probe import ProbeFailed
from router.settings import Drift
from router.workers.device import Device
from router.workers.worker import Worker

T = TypeVar("T")
_LOOK_SECONDS = 0.1


class SpareTime:
    def __init__(self, settings: Drift, metrics: DriftMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        # Until when each device rests from audits, on the monotonic clock.
        self._rests: dict[Device, float] = {}

    async def run(self, worker: Worker, piece: Callable[[], Awaitable[T]], again: bool = True) -> T:
        """The piece's result, once it has run while nobody used the worker's device.

        A user who comes ends it, and it is begun anew later; what it has left in the worker's
        cache by then stays. Raises ProbeFailed: `busy` when the piece is not done after
        `audit_wait_seconds`, and, unless `again`, `interrupted`.
        """
        latest = time.monotonic() + self._settings.audit_wait_seconds
        while True:
            await self._idle(worker, latest)
            began, outcome = time.monotonic(), "failed"
            try:
                async with worker.device.spare():
                    result = await piece()
                outcome = "done"
                return result
            except TimeoutError:
                outcome = "aborted"
                if not again:
                    raise ProbeFailed("interrupted") from None
            finally:
                ended = time.monotonic()
                self._metrics.pieces.labels(outcome).observe(ended - began)
                # Nothing ends a forward pass once it has begun, so how often a user meets one
                # is bounded instead: as often as audits use the device.
                rest = (ended - began) * (1 / self._settings.audit_share - 1)
                self._rests[worker.device] = ended + rest

    async def _idle(self, worker: Worker, latest: float) -> None:
        settings, device = self._settings, worker.device
        while not (
            self._rests.get(device, 0.0) <= time.monotonic()
            and device.idle(settings.audit_idle_seconds)
            and await _unused(worker)
        ):
            if time.monotonic() > latest:
                raise ProbeFailed("busy")
            await asyncio.sleep(_LOOK_SECONDS)


async def _unused(worker: Worker) -> bool:
    """Whether those that share the worker's device do nothing, also for other gateways' users."""
    device = worker.device
    for one in device.workers:
        if one is not worker and not one.available:
            # It is away, and so are its users.
            continue
        try:
            loaded = await probe.loaded(one)
        except ProbeFailed:
            if one is worker:
                raise
            loaded = True
        if loaded:
            device.seen_in_use()
            return False
    # A user may have come while they were asked.
    return device.idle()
