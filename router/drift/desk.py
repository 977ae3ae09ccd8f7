"""What follows a finished turn: it is put on record, perhaps audited, perhaps mapped ahead."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from policies import Decision
from router.drift.ahead import Ahead, Likely
from router.drift.audits import Audits
from router.drift.metrics import DriftMetrics
from router.drift.scoring import Audit
from router.metrics import Metrics
from router.relay.parser import Usage
from router.savings.books import Booking
from router.sessions.base import Session, Store, TurnRecord
from router.settings import Settings, direction
from router.transfer.client import MapperClient
from router.transfer.outcome import Outcome
from router.turns.incoming import Incoming
from router.workers.pool import Pool
from router.workers.worker import CHAT, Worker

if TYPE_CHECKING:
    from router.turns.leg import Leg


class Desk:
    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        store: Store,
        mapper: MapperClient | None,
        metrics: Metrics,
    ) -> None:
        self._settings = settings.drift
        self._pool = pool
        self._metrics = DriftMetrics(metrics.registry)
        seconds = settings.timeouts.tokenize_seconds
        self._audits = Audits(settings.drift, pool.devices, store, self._metrics, metrics, seconds)
        self._ahead = Ahead(settings, mapper, store, self._metrics) if mapper else None

    def start(self) -> None:
        self._audits.start()

    async def stop(self) -> None:
        await self._audits.stop()
        if self._ahead is not None:
            await self._ahead.stop()

    def observe(self) -> None:
        if self._ahead is not None:
            self._ahead.sweep()

    def forget(self, tenant: str, session: str) -> None:
        """The session is deleted: nothing more is done for it."""
        self._audits.forget(tenant, session)
        self.reanchor(tenant, session)

    def reanchor(self, tenant: str, session: str) -> None:
        """Its lossy lineages are given up: what is mapped ahead would be lossy too."""
        if self._ahead is not None:
            self._ahead.cancel(tenant, session)

    def write_down(
        self, worker: Worker, outcome: Outcome, usage: Usage | None, booking: Booking
    ) -> TurnRecord:
        """The turn as it goes into the session's timeline."""
        usage = usage or Usage()
        lossy = outcome.epoch is not None
        return TurnRecord(
            number=0,
            at=time.time(),
            tier=worker.tier,
            model=worker.model,
            kv=outcome.status,
            kv_reason=outcome.reason,
            epoch=outcome.epoch,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens or 0,
            completion_tokens=usage.completion_tokens,
            mapped_tokens=booking.tokens,
            seconds_saved=booking.seconds,
            drift_expected=self._audits.expected.nats(direction(worker.tier)) if lossy else 0.0,
        )

    def follow_up(
        self,
        incoming: Incoming,
        session: Session,
        turn: TurnRecord,
        leg: Leg,
        decision: Decision,
        policy: str,
    ) -> None:
        """Schedules what the turn gives reason for; never waits and never fails.

        `session` is its state with this turn in it, `policy` the name of the one that decided.
        """
        tenant, body = incoming.tenant, incoming.clean
        worker, answer = leg.worker, leg.upstream.answer
        if answer.choices.keys() != {0} or incoming.path != CHAT:
            # Several answers to one prompt have no one continuation.
            return
        (choice,) = answer.choices.values()
        said = choice.message()
        if not said["tool_calls"]:
            # A template may take an empty list for calls.
            del said["tool_calls"]
        # The record as it was kept, with its number.
        turn = next((one for one in session.timeline if one.at == turn.at), turn)
        if turn.epoch is not None and self._wanted(session, turn, policy, decision):
            self._audits.submit(
                Audit(tenant, session.id, session.born, turn, leg.outcome, worker, body, said)
            )
        if self._ahead is None:
            return
        if worker.tier == "large":
            self._ahead.switched(tenant, session.id, turn.epoch)
        elif (target := self._pool.models.get("large")) and self._switch_is_likely(decision):
            self._ahead.begin(Likely(tenant, session.id, worker, target, body, said))

    def _wanted(self, session: Session, turn: TurnRecord, policy: str, decision: Decision) -> bool:
        settings, lossy = self._settings, session.lineage(turn.model).lossy
        above = settings.audit_above_tokens
        if lossy is not None and above is not None and lossy.mapped >= above:
            return True
        # The part of a rollout that decided goes before the rollout.
        rates, part = settings.audit_rates, f"{policy}.{decision.arm}"
        return random.random() < rates.get(part, rates.get(policy, settings.audit_rate))

    def _switch_is_likely(self, decision: Decision) -> bool:
        above = self._settings.ahead_above
        default = self._settings.switch_probability
        return above is not None and decision.scores.get("switch_probability", default) >= above
