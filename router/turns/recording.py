"""What a turn leaves behind: tokens, books and the session's new state."""

from __future__ import annotations

from policies import Decision
from router import log
from router.gateway import Gateway
from router.relay.parser import Usage
from router.savings.books import Booking
from router.sessions import identity, record
from router.sessions.base import Session, StoreDown
from router.turns.incoming import Subject
from router.turns.leg import Leg

logger = log.get("turn")


class Recorder:
    """Records a turn once, whoever comes first: its end, its client's going, or a cut."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.finished = False

    async def finish(
        self,
        subject: Subject,
        decision: Decision,
        leg: Leg,
        usage: Usage | None,
        basis: str,
        complete: bool,
    ) -> None:
        """Before the client can send its next turn."""
        if self.finished:
            return
        self.finished = True
        booking = self._book(leg, usage, basis)
        if subject.store_down:
            return
        direction = _switch(subject, decision)
        if direction is not None:
            self._gateway.metrics.switches.labels(direction, decision.reason).inc()
        digests = _digests(subject, leg)
        turn = self._gateway.drift.write_down(leg.worker, leg.outcome, usage, booking)

        def advance(session: Session) -> None:
            _advance(session, subject, decision, leg, usage, booking)
            record.advance(session, turn, leg.outcome)
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
                subject.incoming, session, turn, leg.worker, decision, leg.upstream.answer
            )

    def _book(self, leg: Leg, usage: Usage | None, basis: str) -> Booking:
        if usage is None:
            return Booking()
        tokens, tier = self._gateway.metrics.tokens, leg.tier
        tokens.labels(tier, "prompt", basis).inc(usage.prompt_tokens)
        tokens.labels(tier, "cached", basis).inc(usage.cached_tokens or 0)
        tokens.labels(tier, "completion", basis).inc(usage.completion_tokens)
        if basis != "reported":
            return Booking()
        books, upstream = self._gateway.books, leg.upstream
        booking = books.book(leg.worker, leg.outcome, usage)
        # Only time to a first event is a prefill, and only of a worker with nothing else
        # to do; restoring transferred pages takes time of its own.
        if upstream.stream and upstream.alone and leg.outcome.extra_key is None:
            books.observe(leg.worker, usage, upstream.first_event_seconds)
        return booking


def _switch(subject: Subject, decision: Decision) -> str | None:
    session = subject.session
    if session is None or session.tier in (None, decision.tier):
        return None
    return "up" if decision.tier == "large" else "down"


def _advance(
    session: Session,
    subject: Subject,
    decision: Decision,
    leg: Leg,
    usage: Usage | None,
    booking: Booking,
) -> None:
    before = subject.session
    if before is not None and session.turns == 0:
        # The first turn of a branch, or of a session that has expired since.
        session.turns, session.tier, session.model = before.turns, before.tier, before.model
    direction = _switch(subject, decision)
    session.switches_up += direction == "up"
    session.switches_down += direction == "down"
    session.turns += 1
    session.tier = decision.tier
    session.model = leg.worker.model
    session.mapped_tokens += booking.tokens
    session.seconds_saved += max(0.0, booking.seconds or 0.0)
    session.seconds_lost += max(0.0, -(booking.seconds or 0.0))
    if usage is not None:
        session.prompt_tokens += usage.prompt_tokens
        session.completion_tokens += usage.completion_tokens


def _digests(subject: Subject, leg: Leg) -> list[str]:
    """Where the conversation stands after each of the answers."""
    if subject.identity.digest is None:
        return []
    choices = leg.upstream.answer.choices
    return [
        identity.conversation([choices[index].message()], subject.identity.digest)
        for index in sorted(choices)
    ]
