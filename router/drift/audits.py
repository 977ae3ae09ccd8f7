"""Audits: turns on mapped KV are scored natively when there is time, off every user's path."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from router import log
from router.drift.expected import Expected
from router.drift.metrics import DriftMetrics
from router.drift.probe import ProbeFailed
from router.drift.scoring import Audit, Finding, Scoring
from router.drift.spare import SpareTime
from router.metrics import Metrics
from router.sessions import record
from router.sessions.base import Store, StoreDown
from router.settings import Drift
from router.workers.device import Device

logger = log.get("audit")


class Audits:
    """A bounded queue for each device, worked off one by one; what does not fit is dropped."""

    def __init__(
        self,
        settings: Drift,
        devices: Iterable[Device],
        store: Store,
        metrics: DriftMetrics,
        gateway_metrics: Metrics,
        tokenize_seconds: float,
    ) -> None:
        self.expected = Expected(settings.expected_nats)
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._gateway_metrics = gateway_metrics
        self._tokenize_seconds = tokenize_seconds
        self._spare = SpareTime(settings, metrics)
        # Two audits of one device would each take the other for its users.
        self._queues: dict[Device, asyncio.Queue[Audit]] = {
            device: asyncio.Queue(settings.audit_queue) for device in devices
        }
        # Each session's latest audit that waits: what it leaves behind serves the earlier ones too.
        self._latest: dict[tuple[str, str, str], Audit] = {}
        self._running: dict[asyncio.Task[str], Audit] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._work(queue), name=f"audits-{number}")
            for number, queue in enumerate(self._queues.values())
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, audit: Audit) -> bool:
        """Whether there was room for it. It takes the place of the session's earlier one."""
        try:
            self._queues[audit.worker.device].put_nowait(audit)
        except asyncio.QueueFull:
            self._metrics.audits.labels(audit.direction, "queue_full").inc()
            return False
        self._latest[audit.lineage] = audit
        self._count_waiting()
        return True

    async def run(self, audit: Audit) -> str:
        """Carries out one audit and writes down what it found; returns what became of it."""
        found, outcome = None, "reanchored"
        scoring = Scoring(audit, self._settings, self._spare, self._tokenize_seconds)
        try:
            found = await scoring.run()
        except ProbeFailed as failure:
            outcome = failure.reason
        else:
            self._metrics.seconds.observe(found.seconds)
            self._settle(audit, found)
        return await self._write_down(audit, outcome, found)

    async def _write_down(self, audit: Audit, outcome: str, found: Finding | None) -> str:
        measured = found and found.measured
        if measured is not None:
            outcome = "measured"
            self.expected.observe(audit.direction, measured.per_token)
            self._metrics.observe(audit.direction, measured)
        anchored = found.exact if found else 0
        try:
            await self._store.amend(
                audit.tenant,
                audit.session,
                lambda session: record.audit(
                    session, audit.turn, measured, anchored, outcome, audit.born
                ),
            )
        except StoreDown:
            outcome = "session_store_down"
        else:
            if anchored:
                self._metrics.reanchored.labels(audit.direction, "audit").inc()
        self._metrics.audits.labels(audit.direction, outcome).inc()
        return outcome

    def forget(self, tenant: str, session: str) -> None:
        """The session is deleted: its audits end where they are, or never begin."""
        for lineage in [one for one in self._latest if one[:2] == (tenant, session)]:
            del self._latest[lineage]
        for task, audit in self._running.items():
            if audit.lineage[:2] == (tenant, session):
                task.cancel()

    async def _work(self, queue: asyncio.Queue[Audit]) -> None:
        while True:
            audit = await queue.get()
            self._count_waiting()
            if self._latest.get(audit.lineage) is audit:
                del self._latest[audit.lineage]
                await self._carry_out(audit, self.run(audit))
            else:
                outcome = "superseded" if audit.lineage in self._latest else "forgotten"
                await self._carry_out(audit, self._write_down(audit, outcome, None))

    async def _carry_out(self, audit: Audit, work: Coroutine[Any, Any, str]) -> None:
        task = asyncio.create_task(work)
        # By task: a session that failed over may have audits on two devices.
        self._running[task] = audit
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            del self._running[task]
        if task.cancelled():
            self._metrics.audits.labels(audit.direction, "forgotten").inc()
        elif error := task.exception():
            # An audit may fail in any way, but the next one is due.
            self._metrics.audits.labels(audit.direction, "error").inc()
            logger.error("audit_failed", error=type(error).__name__, exc_info=error)

    def _count_waiting(self) -> None:
        self._metrics.waiting.set(sum(queue.qsize() for queue in self._queues.values()))

    def _settle(self, audit: Audit, found: Finding) -> None:
        """Books what the turn's transfer saved, by the prefill that was done for the audit."""
        taken, outcome = audit.turn.mapped_tokens, audit.outcome
        if not 0 < taken <= found.computed:
            # Some of it was exact already, and says nothing of what it would have cost.
            return
        saved = found.seconds * taken / found.computed - outcome.seconds
        series = self._gateway_metrics.saved if saved >= 0 else self._gateway_metrics.lost
        series.labels(outcome.pair, outcome.direction, "measured").inc(abs(saved))
