"""All workers by tier, their health checks, and the pick for a session."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict

from router import log
from router.metrics import Metrics
from router.settings import Settings, Tier
from router.workers.affinity import choose
from router.workers.device import Device
from router.workers.worker import Worker

logger = log.get("workers")

_STATES = {"closed": 0, "half_open": 1, "open": 2}
# A worker is taken out after this many failed checks, and back in after one good one.
_FAILED_CHECKS = 2


class Pool:
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._pool = settings.pool
        self._metrics = metrics
        devices: defaultdict[str, Device] = defaultdict(Device)
        self.workers = [
            Worker(worker, settings.pool, settings.timeouts, devices[worker.computes_on])
            for worker in settings.workers
        ]
        self.devices = list(devices.values())
        self.models: dict[Tier, str] = {w.tier: w.model for w in self.workers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._watch(worker), name=f"health-{worker.name}")
            for worker in self.workers
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            await worker.close()

    def tier_of(self, model: str) -> Tier | None:
        return next((tier for tier, name in self.models.items() if name == model), None)

    def available(self, tier: Tier) -> list[Worker]:
        return [w for w in self.workers if w.tier == tier and w.available]

    def pick(self, tier: Tier, key: str, without: set[str] = frozenset()) -> Worker | None:
        candidates = [w for w in self.available(tier) if w.name not in without]
        return choose(key, candidates, self._pool.load_bound) if candidates else None

    def observe(self) -> None:
        """Brings the gauges up to date; called when metrics are read."""
        for worker in self.workers:
            self._metrics.worker_up.labels(worker.name, worker.tier).set(worker.healthy)
            self._metrics.breaker.labels(worker.name).set(_STATES[worker.breaker.state])
            self._metrics.worker_in_flight.labels(worker.name).set(worker.in_flight)

    async def _watch(self, worker: Worker) -> None:
        failed = 0
        while True:
            good = await worker.check(self._pool.health_timeout_seconds)
            failed = 0 if good else failed + 1
            healthy = good or (worker.healthy and worker.checked and failed < _FAILED_CHECKS)
            if healthy != worker.healthy or not worker.checked:
                logger.info("worker_health", worker=worker.name, healthy=healthy)
            if healthy and not worker.healthy:
                worker.up_since = time.time()
            worker.healthy, worker.checked = healthy, True
            # A worker that is down is looked at more often, so that it is back soon.
            pause = self._pool.health_seconds if good else min(1.0, self._pool.health_seconds)
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
