"""Gets an answer started: retries and hedges, all before the client has seen a byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

from router import log
from router.errors import ApiError
from router.metrics import Metrics
from router.settings import Settings, Tier
from router.turns.upstream import LOAD_FAILED, Upstream
from router.workers.pool import Pool
from router.workers.worker import UpstreamError, Worker

logger = log.get("dispatch")


@dataclass(frozen=True)
class Request:
    path: str
    body: bytes
    headers: Mapping[str, str]
    stream: bool
    # What keeps a session on its worker.
    affinity: str


class NoWorker(UpstreamError):
    def __init__(self, tier: Tier) -> None:
        message = f"No worker of the {tier} tier is available."
        super().__init__(
            "no_worker",
            ApiError(503, message, code="no_worker", headers={"retry-after": "5"}),
            elsewhere=True,
        )


class Dispatcher:
    def __init__(self, settings: Settings, pool: Pool, metrics: Metrics) -> None:
        self._timeouts = settings.timeouts
        self._retries = settings.retries
        self._pool = pool
        self._metrics = metrics

    async def open(self, tier: Tier, first: Worker, request: Request) -> Upstream:
        """An answer of the tier's, starting with worker `first`. Raises UpstreamError."""
        worker: Worker | None = first
        failed: set[str] = set()
        last: UpstreamError = NoWorker(tier)
        for attempt in range(self._retries.attempts):
            if worker is None:
                break
            if attempt:
                self._metrics.retries.labels(last.reason).inc()
                pause = self._retries.backoff_seconds * 2 ** (attempt - 1)
                await asyncio.sleep(random.uniform(0, pause))
            try:
                return await self._attempt(tier, worker, request, failed)
            except UpstreamError as error:
                logger.warning("worker_failed", worker=worker.name, reason=error.reason)
                if error.reason == LOAD_FAILED or not error.elsewhere:
                    raise
                last = error
            failed.add(worker.name)
            again = worker if last.again and worker.available else None
            worker = self._pool.pick(tier, request.affinity, failed) or again
        raise last

    async def _attempt(
        self, tier: Tier, worker: Worker, request: Request, failed: set[str]
    ) -> Upstream:
        delay = self._retries.hedge_after_seconds
        if delay is None:
            return await self._send(worker, request)
        tasks = [asyncio.create_task(self._send(worker, request))]
        try:
            await asyncio.wait(tasks, timeout=delay)
            without = failed | {worker.name}
            if not tasks[0].done() and (second := self._pool.pick(tier, request.affinity, without)):
                tasks.append(asyncio.create_task(self._send(second, request)))
            return await self._winner(tasks)
        finally:
            await _discard(tasks)

    async def _winner(self, tasks: list[asyncio.Task[Upstream]]) -> Upstream:
        """The first to succeed; when all fail, the first one's error."""
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    if len(tasks) > 1:
                        winner = "first" if task is tasks[0] else "second"
                        self._metrics.hedges.labels(winner).inc()
                    tasks.remove(task)
                    return task.result()
        return tasks[0].result()

    async def _send(self, worker: Worker, request: Request) -> Upstream:
        upstream = Upstream(worker, self._metrics, self._timeouts, request.stream)
        await upstream.open(request.path, request.body, request.headers)
        return upstream


async def _discard(tasks: list[asyncio.Task[Upstream]]) -> None:
    """Ends what is left of a race, also an answer that came in as the other one won."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Upstream):
            await result.close()
