"""Eager mapping: a likely switch's pages are mapped before it is asked for."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from router import log
from router.drift import probe
from router.drift.metrics import DriftMetrics
from router.drift.probe import ProbeFailed
from router.sessions import record
from router.sessions.base import Session, Store, StoreDown
from router.sessions.lineage import Epoch, extra_key
from router.settings import Settings
from router.transfer.client import MapperClient, Namespace, TransferAnswer, TransferRequest
from router.transfer.plan import new_epoch
from router.workers.worker import Worker

logger = log.get("ahead")
_GRACE_SECONDS = 1.0
# Sessions whose mapped pages are waited for; beyond, the oldest count as wasted.
_MOST = 10_000


@dataclass(frozen=True)
class Likely:
    """A switch that may come. `body` and `answer` hold the user's words and are never logged."""

    tenant: str
    session: str
    source: Worker
    target_model: str
    body: dict[str, Any]
    answer: dict[str, Any]


@dataclass
class _Unused:
    epoch: Epoch
    tokens: int
    since: float


class Ahead:
    """One transfer at a time and session, and an account of what was mapped for nothing."""

    def __init__(
        self, settings: Settings, client: MapperClient, store: Store, metrics: DriftMetrics
    ) -> None:
        self._settings = settings
        self._client = client
        self._store = store
        self._metrics = metrics
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        # Least recently mapped first.
        self._unused: OrderedDict[tuple[str, str], _Unused] = OrderedDict()

    async def stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, likely: Likely) -> None:
        key = (likely.tenant, likely.session)
        self.cancel(*key)
        task = asyncio.create_task(self._run(likely), name="map-ahead")
        self._running[key] = task
        task.add_done_callback(lambda done: self._forget(key, done))

    def cancel(self, tenant: str, session: str) -> None:
        """What is under way is stopped; pages that are there already stay."""
        if (task := self._running.get((tenant, session))) is not None:
            task.cancel()

    def switched(self, tenant: str, session: str, epoch: Epoch | None) -> None:
        """The model that pages were mapped for has answered, on the lineage `epoch`."""
        unused = self._unused.pop((tenant, session), None)
        if unused is not None:
            outcome = "used" if unused.epoch == epoch else "wasted"
            self._metrics.ahead_tokens.labels(outcome).inc(unused.tokens)

    def sweep(self) -> None:
        """Counts as wasted what no turn has come for."""
        oldest = time.monotonic() - self._settings.drift.ahead_wasted_seconds
        while self._unused:
            key, unused = next(iter(self._unused.items()))
            if unused.since > oldest and len(self._unused) <= _MOST:
                return
            del self._unused[key]
            self._metrics.ahead_tokens.labels("wasted").inc(unused.tokens)

    def _forget(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        if self._running.get(key) is done:
            del self._running[key]

    async def _run(self, likely: Likely) -> None:
        outcome = "cancelled"
        try:
            outcome = await self._map(likely)
        except (ProbeFailed, httpx.HTTPError, TimeoutError, ValidationError, StoreDown) as error:
            outcome = "failed"
            logger.info("map_ahead_failed", error=type(error).__name__)
        finally:
            self._metrics.ahead.labels(outcome).inc()

    async def _map(self, likely: Likely) -> str:
        settings = self._settings
        _, token_ids = await probe.conversation_ids(
            likely.source, likely.body, likely.answer, settings.timeouts.tokenize_seconds
        )
        target = likely.target_model
        # The lineage is in the session's state before its pages are in the store, so that a
        # turn that comes in the meantime goes on with what is there.
        session = await self._store.amend(
            likely.tenant, likely.session, lambda session: _reserve(session, target)
        )
        if session is None or (epoch := session.lineage(target).epoch) is None:
            return "gone"
        source = session.lineage(likely.source.model)
        answer = await self._transfer(
            TransferRequest(
                session=likely.session,
                token_ids=token_ids,
                deadline_ms=settings.drift.ahead_deadline_ms,
                native_tail=settings.transfers.native_tail,
                min_mapped_tokens=settings.transfers.min_mapped_tokens,
                background=True,
                source=Namespace(
                    model=likely.source.model,
                    extra_key=extra_key(likely.session, source.epoch),
                    cache_salt=likely.tenant,
                ),
                target=Namespace(
                    model=target,
                    extra_key=extra_key(likely.session, epoch),
                    cache_salt=likely.tenant,
                ),
            )
        )
        if answer.status != "applied" or not answer.mapped_tokens:
            return "nothing"
        self._wait_for(likely, epoch, answer.mapped_tokens)
        await self._store.amend(
            likely.tenant,
            likely.session,
            lambda session: record.map_ahead(
                session, target, epoch, answer.exact_tokens, answer.mapped_tokens, source.drift
            ),
        )
        return "mapped"

    async def _transfer(self, request: TransferRequest) -> TransferAnswer:
        seconds = request.deadline_ms / 1000 + _GRACE_SECONDS
        async with asyncio.timeout(seconds):
            return await self._client.transfer(request, seconds)

    def _wait_for(self, likely: Likely, epoch: Epoch, tokens: int) -> None:
        key = (likely.tenant, likely.session)
        self._metrics.ahead_tokens.labels("mapped").inc(tokens)
        old = self._unused.pop(key, None)
        if old is not None and old.epoch == epoch:
            tokens += old.tokens
        elif old is not None:
            self._metrics.ahead_tokens.labels("wasted").inc(old.tokens)
        self._unused[key] = _Unused(epoch, tokens, time.monotonic())
        self.sweep()


def _reserve(session: Session, model: str) -> None:
    mine = session.lineage(model)
    epoch = mine.epoch or new_epoch(session)
    # What is exact will be linked, so that the lineage holds it already for all purposes.
    record.map_ahead(session, model, epoch, exact=mine.exact, mapped=0, drift=0.0)
