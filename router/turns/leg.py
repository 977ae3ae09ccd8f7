"""One tier's part in a turn: KV carried over to a worker, and an answer opened there."""

from __future__ import annotations

from typing import Any

import httpx
import orjson

from policies import Decision
from router.gateway import Gateway
from router.relay.parser import Usage
from router.sessions.base import Session
from router.settings import Tier
from router.transfer.outcome import Outcome
from router.turns import outgoing
from router.turns.dispatch import NoWorker, Request
from router.turns.incoming import Subject
from router.turns.upstream import LOAD_FAILED, Upstream
from router.workers.worker import CHAT, UpstreamError, Worker

_LOAD_RETRIES = 2


class Leg:
    def __init__(self, gateway: Gateway, subject: Subject, tier: Tier) -> None:
        self.tier = tier
        self.outcome = Outcome("none", "first_turn")
        self.worker: Worker | None = None
        self.upstream: Upstream | None = None
        # The session's state when KV was carried over.
        self.session: Session | None = None
        # What the worker reports, or the gateway has counted; None is not known.
        self.usage: Usage | None = None
        self.basis = "reported"
        # What was asked about the answer afterwards.
        self.checks: list[Usage] = []
        self._gateway = gateway
        self._subject = subject
        self._incoming = subject.incoming

    async def open(self, session: Session | None, decision: Decision, body: dict[str, Any]) -> None:
        """Carries over what `session` has and gets the answer started. Raises UpstreamError."""
        gateway, self.session = self._gateway, session
        worker = gateway.pool.pick(self.tier, self._subject.affinity)
        if worker is None:
            raise NoWorker(self.tier)
        # Before the worker hears of it: what else is done on its device may end by then.
        with worker.device.in_use():
            self.outcome = await self._carry_over(session, decision, worker)
        gateway.metrics.turns.labels(self.tier, decision.reason).inc()
        try:
            self.upstream = await self._dispatch(worker, body)
        finally:
            gateway.transfers.count(self.outcome)
        self.worker = self.upstream.worker

    async def close(self) -> None:
        if self.upstream is not None:
            await self.upstream.close()

    async def settle(self, count: bool) -> None:
        """Fixes `usage` when the answer has ended; with `count` also of one that was cut short."""
        answer = self.upstream.answer
        self.usage = answer.usage
        if self.usage is None and count:
            self.basis = "counted"
            self.usage = Usage(await self._count_prompt(), answer.content_events)

    async def _count_prompt(self) -> int:
        if self._incoming.path != CHAT:
            return 0
        seconds = self._gateway.settings.timeouts.tokenize_seconds
        try:
            return len(await self.worker.tokenize(self._incoming.clean, seconds))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0

    async def _carry_over(
        self, session: Session | None, decision: Decision, worker: Worker
    ) -> Outcome:
        if self._subject.store_down:
            return Outcome("native", "session_store_down", pair="unknown", direction="unknown")
        if self._incoming.path != CHAT:
            return Outcome("none", "no_conversation")
        return await self._gateway.transfers.prepare(
            session, self._incoming.tenant, self._incoming.clean, worker, decision
        )

    async def _dispatch(self, worker: Worker, body: dict[str, Any]) -> Upstream:
        for attempt in range(1 + _LOAD_RETRIES):
            try:
                return await self._gateway.dispatcher.open(
                    self.tier, worker, self._request(worker, body)
                )
            except UpstreamError as error:
                if error.reason != LOAD_FAILED or attempt == _LOAD_RETRIES:
                    raise
            # Pages could not be restored. They are gone by now, and exact KV will do;
            # damaged exact pages are found, and gone, at the attempt after.
            self.outcome = self.outcome.natively(LOAD_FAILED)

    def _request(self, worker: Worker, body: dict[str, Any]) -> Request:
        incoming = self._incoming
        sent = outgoing.for_worker(body, worker.model, incoming.tenant, self.outcome.extra_key)
        return Request(
            path=incoming.path,
            body=orjson.dumps(sent),
            headers=outgoing.headers(incoming.headers, incoming.request_id),
            stream=incoming.stream,
            affinity=self._subject.affinity,
        )
