"""Audits: a finished turn's answer scored under native KV, off every user's path.

An answer was generated on a lossy lineage. Its tokens are scored twice by the same worker and
in the same way: on that lineage, whose KV is still there, and in the exact namespace. The mean
difference is the turn's drift. Scoring the lineage once more, rather than asking for
log-probabilities with the answer itself, leaves the client's stream alone, costs a prefill of
the answer only, and compares like with like: SGLang's log-probabilities of generated tokens
depend on the request's temperature, those of a prompt do not. The second pass leaves exact KV
of the whole turn behind, on which the session goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from router import log
from router.drift import probe
from router.drift.expected import Expected
from router.drift.metrics import DriftMetrics
from router.drift.probe import Namespace, ProbeFailed
from router.metrics import Metrics
from router.sessions import record
from router.sessions.base import Store, StoreDown, TurnRecord
from router.sessions.lineage import extra_key
from router.sessions.record import Measurement
from router.settings import Drift, direction
from router.transfer.outcome import Outcome
from router.workers.worker import Worker

logger = log.get("audit")
_LOOK_SECONDS = 0.1
# Tokens that a template may put after an answer: its end, and a line end.
_CLOSING = 4


@dataclass(frozen=True)
class Audit:
    """One answered turn. `body` and `answer` hold the user's words and are never logged."""

    tenant: str
    session: str
    born: str
    turn: TurnRecord
    outcome: Outcome
    worker: Worker
    body: dict[str, Any]
    answer: dict[str, Any]

    @property
    def direction(self) -> str:
        return direction(self.worker.tier)


class Audits:
    """A bounded queue and a few tasks that work it off; what does not fit is dropped."""

    def __init__(
        self,
        settings: Drift,
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
        self._queue: asyncio.Queue[Audit] = asyncio.Queue(settings.audit_queue)
        self._tasks: list[asyncio.Task[None]] = []
        # Two audits of one worker would each take the other for its users.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._work(), name=f"audit-{number}")
            for number in range(self._settings.audit_concurrency)
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, audit: Audit) -> bool:
        """Whether there was room for it."""
        try:
            self._queue.put_nowait(audit)
        except asyncio.QueueFull:
            self._metrics.audits.labels(audit.direction, "queue_full").inc()
            return False
        self._metrics.waiting.set(self._queue.qsize())
        return True

    async def run(self, audit: Audit) -> str:
        """Carries out one audit and writes down what it found; returns what became of it."""
        found, anchored, outcome = None, 0, "reanchored"
        try:
            async with self._turns[audit.worker.name]:
                found, anchored = await self._measure(audit)
        except ProbeFailed as failure:
            outcome = failure.reason
        if found is not None:
            outcome = "measured"
            self.expected.observe(audit.direction, found.per_token)
            self._metrics.observe(audit.direction, found)
        try:
            await self._store.amend(
                audit.tenant,
                audit.session,
                lambda session: record.audit(
                    session, audit.turn, found, anchored, outcome, audit.born
                ),
            )
        except StoreDown:
            outcome = "session_store_down"
        else:
            if anchored:
                self._metrics.reanchored.labels(audit.direction, "audit").inc()
        self._metrics.audits.labels(audit.direction, outcome).inc()
        return outcome

    async def _work(self) -> None:
        while True:
            audit = await self._queue.get()
            self._metrics.waiting.set(self._queue.qsize())
            try:
                await self.run(audit)
            except Exception as error:
                # An audit may fail in any way, but the next one is due.
                self._metrics.audits.labels(audit.direction, "error").inc()
                logger.exception("audit_failed", error=type(error).__name__)

    async def _measure(self, audit: Audit) -> tuple[Measurement | None, int]:
        """What was measured, if anything could be, and of how many tokens exact KV is there."""
        await self._until_idle(audit.worker)
        prompt, whole = await probe.conversation_ids(
            audit.worker, audit.body, audit.answer, self._tokenize_seconds
        )
        mapped = await self._on_lineage(audit, prompt, whole)
        native = await self._exactly(audit, whole, len(prompt) if mapped else None)
        if mapped is None:
            return None, len(whole)
        pairs = zip(mapped.logprobs, native.logprobs, strict=False)
        return Measurement(tuple(one - other for one, other in pairs)), len(whole)

    async def _on_lineage(
        self, audit: Audit, prompt: list[int], whole: list[int]
    ) -> probe.Scored | None:
        """Scores the answer on the KV that it was generated on, if both are known for sure."""
        start, length = len(prompt), audit.turn.completion_tokens
        # The answer's own tokens are not known, only its text: they are taken for those of the
        # conversation if there are as many, and if it is cut where the answer was begun.
        closing = len(whole) - start - length
        if whole[:start] != prompt or not length or not 0 <= closing <= _CLOSING:
            return None
        lineage = Namespace(audit.tenant, extra_key(audit.session, audit.turn.epoch))
        priority = self._settings.audit_priority
        ids = whole[: start + length]
        scored = await probe.score(audit.worker, ids, start, lineage, priority)
        # Less than the turn found has been computed anew since: another answer's KV.
        return scored if scored.cached_tokens >= audit.turn.cached_tokens else None

    async def _exactly(self, audit: Audit, whole: list[int], start: int | None) -> probe.Scored:
        """Leaves exact KV of `whole` behind, and scores its tokens from `start` on, if given."""
        worker, exact = audit.worker, Namespace(audit.tenant)
        piece, priority = self._settings.audit_piece_tokens, self._settings.audit_priority
        seconds, computed = 0.0, 0
        end = len(whole) if start is None else start
        for length in (*range(piece, end, piece), len(whole)):
            await self._until_idle(worker)
            began = time.monotonic()
            if start is None or length < len(whole):
                scored = await probe.prefill(worker, whole[:length], exact, priority)
            else:
                scored = await probe.score(worker, whole, start, exact, priority)
            seconds += time.monotonic() - began
            computed += length - scored.cached_tokens
        self._metrics.seconds.observe(seconds)
        self._settle(audit, seconds, computed)
        return scored

    def _settle(self, audit: Audit, seconds: float, computed: int) -> None:
        """Books what the turn's transfer saved, by the prefill that was done for the audit."""
        taken, outcome = audit.turn.mapped_tokens, audit.outcome
        if not 0 < taken <= computed:
            # Some of it was exact already, and says nothing of what it would have cost.
            return
        saved = seconds * taken / computed - outcome.seconds
        series = self._gateway_metrics.saved if saved >= 0 else self._gateway_metrics.lost
        series.labels(outcome.pair, outcome.direction, "measured").inc(abs(saved))

    async def _until_idle(self, worker: Worker) -> None:
        """Raises ProbeFailed when the worker stays busy."""
        started = time.monotonic()
        while not await probe.idle(worker):
            if time.monotonic() - started > self._settings.audit_wait_seconds:
                raise ProbeFailed("busy")
            await asyncio.sleep(_LOOK_SECONDS)
