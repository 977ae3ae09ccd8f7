"""What a finished turn, or its audit, does to a session."""

from __future__ import annotations

from dataclasses import dataclass

from router.sessions import lineage
from router.sessions.base import POSITIONS, TIMELINE, DriftTotals, Session, TurnRecord
from router.settings import direction
from router.transfer.outcome import Outcome


@dataclass(frozen=True)
class Measurement:
    """An audit's finding: (mapped - native) log-probability of each token of one answer, in nats."""

    nats: tuple[float, ...]

    @property
    def per_token(self) -> float:
        return sum(self.nats) / len(self.nats)


def advance(session: Session, turn: TurnRecord, outcome: Outcome, born: str) -> None:
    """The turn's place in the timeline, and what it did to its model's lineage."""
    turn = turn.model_copy(update={"number": session.turns})
    session.timeline = [*session.timeline, turn][-TIMELINE:]
    _use(session, turn, outcome, born)


def take_back(session: Session, turn: TurnRecord, outcome: Outcome, born: str) -> None:
    """As `advance`, for an answer that a cascade took back: its words are not the conversation's."""
    _use(session, turn.model_copy(update={"completion_tokens": 0}), outcome, born)


def _use(session: Session, turn: TurnRecord, outcome: Outcome, born: str) -> None:
    """What an answer did to its model's lineage.

    `born` is that of the session as the turn found it. If it has been deleted since, or has
    expired, the lossy lineage that the turn was answered on went with it.
    """
    if outcome.epoch is not None and born and born != session.born:
        return
    before = session.lineage(turn.model)
    tokens = turn.prompt_tokens + turn.completion_tokens
    if outcome.epoch is None:
        # A turn that was cut before its usage came tells nothing of the span.
        after = lineage.prefilled(before, tokens or before.exact)
    else:
        after = before
        if outcome.status == "applied":
            after = lineage.transferred(
                before,
                outcome.epoch,
                exact=outcome.exact_tokens,
                mapped=outcome.mapped_tokens,
                drift=outcome.inherited_drift,
            )
        if tokens:
            after = lineage.evicted(after, turn.cached_tokens)
        after = lineage.answered(after, outcome.epoch, tokens, turn.drift_expected)
        session.epoch = max(session.epoch, lineage.ordinal(outcome.epoch))
    session.lineages = {**session.lineages, turn.model: after}


def map_ahead(
    session: Session, model: str, epoch: lineage.Epoch, exact: int, mapped: int, drift: float
) -> None:
    """Pages of `model` were mapped, or are about to be, before any turn asked for them."""
    after = lineage.transferred(
        session.lineage(model), epoch, exact=exact, mapped=mapped, drift=drift
    )
    session.epoch = max(session.epoch, lineage.ordinal(epoch))
    session.lineages = {**session.lineages, model: after}


def audit(
    session: Session,
    turn: TurnRecord,
    found: Measurement | None,
    anchored_tokens: int,
    outcome: str,
    born: str,
) -> None:
    """An audit of `turn` ended with `outcome`; `born` as in `advance`.

    `found` is what it measured, if it did; with `anchored_tokens` exact KV of so many tokens is
    there now, and the turn's lossy lineage is given up.
    """
    if born != session.born:
        return
    changed: dict[str, object] = {"audit": outcome}
    after = session.lineage(turn.model)
    if found is not None:
        changed |= {"drift": found.per_token, "drift_first_token": found.nats[0]}
        after = lineage.measured(after, turn.epoch, found.per_token - turn.drift_expected)
        _total(session, direction(turn.tier), found)
    if anchored_tokens:
        after = lineage.reanchored(after, turn.epoch, anchored_tokens)
    session.lineages = {**session.lineages, turn.model: after}
    session.timeline = [
        # Two turns at once may have one number, but never one time as well.
        one.model_copy(update=changed) if (one.number, one.at) == (turn.number, turn.at) else one
        for one in session.timeline
    ]


def abandon(session: Session) -> None:
    """Gives up every lossy lineage: each model's next turn is prefilled exactly."""
    session.lineages = {model: lineage.abandoned(one) for model, one in session.lineages.items()}


def restart(session: Session, model: str) -> None:
    """The model's worker has started anew since it last answered this session."""
    session.lineages = {
        **session.lineages,
        model: lineage.restarted(session.lineage(model)),
    }


def position(index: int) -> int:
    """The part of an answer, see POSITIONS, in which its token `index` lies."""
    return next((part for part, end in enumerate(POSITIONS) if index < end), len(POSITIONS))


def _total(session: Session, direction: str, found: Measurement) -> None:
    total = session.drift.get(direction, DriftTotals()).model_copy(deep=True)
    total.turns += 1
    total.tokens += len(found.nats)
    total.nats += sum(found.nats)
    for index, nats in enumerate(found.nats):
        total.position_tokens[position(index)] += 1
        total.position_nats[position(index)] += nats
    session.drift = {**session.drift, direction: total}
