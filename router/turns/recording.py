"""What a turn leaves behind: tokens, money, books and the session's new state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from policies import Decision, Spent
from router import log
from router.budgets import base as budgets
from router.budgets.prices import cost
from router.gateway import Gateway
from router.relay.parser import Usage
from router.routing.length import mappable_tokens
from router.savings.books import Booking
from router.sessions import identity, record
from router.sessions.base import Session, StoreDown
from router.settings import Tier, direction
from router.turns.incoming import Subject
from router.turns.leg import Leg

logger = log.get("turn")


class Recorder:
    """Records a turn once, whoever comes first: its end, its client's going, or a cut."""

    def __init__(self, gateway: Gateway, policy: str) -> None:
        self._gateway = gateway
        # The name of the policy that decided.
        self._policy = policy
        self.finished = False
        self.spent = Spent()

    async def finish(
        self, subject: Subject, decision: Decision, legs: Sequence[Leg], complete: bool
    ) -> None:
        """Before the client can send its next turn. The last of the legs is the answer."""
        if self.finished:
            return
        self.finished = True
        bookings = [self._book(subject, one) for one in legs]
        await asyncio.gather(
            self.pay(subject.incoming.tenant),
            self._save(subject, decision, legs, bookings, complete),
        )

    async def pay(self, tenant: str) -> None:
        """Puts what the turn has cost on the tenant's account, once."""
        if self.spent != Spent():
            await self._gateway.ledger.add(tenant, self.spent)

    def charge(self, tier: Tier, usage: Usage, basis: str = "reported") -> None:
        metrics = self._gateway.metrics
        metrics.tokens.labels(tier, "prompt", basis).inc(usage.prompt_tokens)
        metrics.tokens.labels(tier, "cached", basis).inc(usage.cached_tokens or 0)
        metrics.tokens.labels(tier, "completion", basis).inc(usage.completion_tokens)
        spent = cost(tier, self._gateway.settings.prices.of(tier), usage)
        metrics.money.labels(tier).inc(spent.money)
        self.spent = budgets.plus(self.spent, spent)

    async def _save(
        self,
        subject: Subject,
        decision: Decision,
        legs: Sequence[Leg],
        bookings: Sequence[Booking],
        complete: bool,
    ) -> None:
        if subject.store_down:
            return
        leg = legs[-1]
        direction = _switch(subject, decision)
        if direction is not None:
            self._gateway.metrics.switches.labels(direction, decision.reason).inc()
        digests = _digests(subject, leg)
        *earlier, turn = [
            self._gateway.drift.write_down(one.worker, one.outcome, one.usage, booking)
            for one, booking in zip(legs, bookings, strict=True)
        ]

        born = subject.session.born if subject.session is not None else ""

        def advance(session: Session) -> None:
            _advance(session, subject, decision, legs, bookings, self.spent)
            for one, taken_back in zip(legs, earlier, strict=False):
                record.take_back(session, taken_back, one.outcome, born)
            record.advance(session, turn, leg.outcome, born)
            if complete and digests:
                session.head = digests[0]

        try:
            session = await self._gateway.store.update(
                subject.incoming.tenant, subject.identity.id, advance, digests if complete else []
            )
        except StoreDown:
            logger.warning("session_not_saved", session=subject.identity.id)
            return
        if complete:
            self._gateway.drift.follow_up(
                subject.incoming, session, turn, leg, decision, self._policy
            )

    def _book(self, subject: Subject, leg: Leg) -> Booking:
        for usage in leg.checks:
            self.charge(leg.tier, usage)
        if leg.usage is None:
            return Booking()
        self.charge(leg.tier, leg.usage, leg.basis)
        if leg.basis != "reported":
            return Booking()
        booking = self._gateway.books.book(leg.worker, leg.outcome, leg.usage)
        self._learn(subject, leg, booking)
        return booking

    def _learn(self, subject: Subject, leg: Leg, booking: Booking) -> None:
        """What the answer tells of prompts, worker and mapper."""
        books, upstream, usage, outcome = (
            self._gateway.books, leg.upstream, leg.usage, leg.outcome,
        )  # fmt: skip
        self._gateway.route.length.observe(subject.incoming, usage.prompt_tokens)
        # Only time to a first event is a prefill, and only of a worker with nothing else
        # to do; restoring transferred pages takes time of its own.
        if upstream.stream and upstream.alone and outcome.extra_key is None:
            books.observe(leg.worker, usage, upstream.first_event_seconds)
        if upstream.stream and upstream.answer.done:
            books.decode(leg.worker.name).observe(usage.completion_tokens, upstream.writing_seconds)
        if leg.session is not None and outcome.direction in ("up", "down") and outcome.seconds:
            transfers = self._gateway.settings.transfers
            model, prompt = leg.worker.model, usage.prompt_tokens
            expected = mappable_tokens(transfers, leg.session, model, prompt)
            books.transfer(outcome.direction).observe(expected, booking.tokens, outcome.seconds)


def _switch(subject: Subject, decision: Decision) -> str | None:
    session = subject.session
    if session is None or session.tier in (None, decision.tier):
        return None
    return direction(decision.tier)


def _advance(
    session: Session,
    subject: Subject,
    decision: Decision,
    legs: Sequence[Leg],
    bookings: Sequence[Booking],
    spent: Spent,
) -> None:
    before = subject.session
    if before is not None and session.turns == 0:
        # The first turn of a branch, or of a session that has expired since.
        session.turns, session.tier, session.model = before.turns, before.tier, before.model
        session.stay = before.stay
    direction = _switch(subject, decision)
    session.switches_up += direction == "up"
    session.switches_down += direction == "down"
    session.turns += 1
    session.stay = session.stay + 1 if session.tier == decision.tier else 1
    session.tier = decision.tier
    session.model = legs[-1].worker.model
    session.memory = decision.memory
    session.spent = budgets.plus(session.spent, spent)
    for leg, booking in zip(legs, bookings, strict=True):
        session.mapped_tokens += booking.tokens
        session.seconds_saved += max(0.0, booking.seconds or 0.0)
        session.seconds_lost += max(0.0, -(booking.seconds or 0.0))
        if leg.usage is not None:
            session.prompt_tokens += leg.usage.prompt_tokens
            session.completion_tokens += leg.usage.completion_tokens


def _digests(subject: Subject, leg: Leg) -> list[str]:
    """Where the conversation stands after each of the answers."""
    if subject.identity.digest is None:
        return []
    choices = leg.upstream.answer.choices
    return [
        identity.conversation([choices[index].message()], subject.identity.digest)
        for index in sorted(choices)
    ]
