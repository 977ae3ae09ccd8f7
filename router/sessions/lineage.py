"""Where a model's KV of one session stands: exact, lossy or none, and how each event moves it.

Everything here is a pure function over immutable values. Numbers of tokens are what was last
known and never decide what is read: that is decided by page keys, which hold the namespace and
the tokens. What must be right is the namespace: an exact one is only ever given to a turn whose
KV is exact, and a lossy one that was given up is never given to a turn again.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# "<ordinal>-<chance>": the ordinal orders the epochs of a session, so that what arrives late is
# recognised; chance keeps an epoch from ever naming an earlier one's pages, also when two
# turns begin one at once or a session's state was lost and starts again.
Epoch = str


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Lossy(_Frozen):
    """A lineage that holds mapped KV and what was computed on top of it."""

    epoch: Epoch
    tokens: int = Field(default=0, ge=0)
    # Leading tokens that are exact all the same: linked, not mapped.
    exact: int = Field(default=0, ge=0)
    mapped: int = Field(default=0, ge=0)
    # Nats per token, summed over the turns answered on it and on the lineages it was mapped from.
    drift: float = 0.0
    # Mapped ahead of a switch; no turn was answered on it yet.
    ahead: bool = False


class Lineage(_Frozen):
    """One model's side of a session."""

    # Leading tokens of the conversation that were computed in the exact namespace.
    exact: int = Field(default=0, ge=0)
    lossy: Lossy | None = None
    # Epochs up to this ordinal are given up for good.
    retired: int = Field(default=0, ge=0)
    # False once the worker has lost its memory: the tokens are what it had, until a turn tells.
    confirmed: bool = True
    # Exact by an audit and not by a turn of its own.
    anchored: bool = False

    @property
    def status(self) -> Literal["none", "exact", "lossy"]:
        if self.lossy is not None:
            return "lossy"
        return "exact" if self.exact else "none"

    @property
    def epoch(self) -> Epoch | None:
        """The namespace to go on in: an epoch, or None for the exact one."""
        return self.lossy.epoch if self.lossy else None

    @property
    def drift(self) -> float:
        return self.lossy.drift if self.lossy else 0.0


def ordinal(epoch: Epoch) -> int:
    return int(epoch.partition("-")[0])


def extra_key(session: str, epoch: Epoch | None) -> str | None:
    """The worker's namespace: none for exact KV, one of its own for every lossy lineage."""
    return None if epoch is None else f"lossy:{session}:{epoch}"


def prefilled(lineage: Lineage, tokens: int) -> Lineage:
    """A turn was answered in the exact namespace: its lossy lineage is not needed any more."""
    return _retired(lineage).model_copy(
        update={"exact": tokens, "confirmed": True, "anchored": False}
    )


def transferred(
    lineage: Lineage, epoch: Epoch, *, exact: int, mapped: int, drift: float = 0.0
) -> Lineage:
    """Mapped pages were written under `epoch`. `drift` is what their source had already.

    Of two lineages begun at once the later one stays; one that was given up stays given up.
    """
    if ordinal(epoch) <= lineage.retired:
        return lineage
    old = lineage.lossy
    if old is not None and old.epoch == epoch:
        changed = {
            "exact": max(old.exact, exact),
            "mapped": old.mapped + mapped,
            "tokens": max(old.tokens, exact + old.mapped + mapped),
            "drift": max(old.drift, drift),
        }
        return lineage.model_copy(update={"lossy": old.model_copy(update=changed)})
    if old is not None and ordinal(old.epoch) > ordinal(epoch):
        return lineage
    new = Lossy(
        epoch=epoch, tokens=exact + mapped, exact=exact, mapped=mapped, drift=drift, ahead=True
    )
    return lineage.model_copy(update={"lossy": new})


def answered(lineage: Lineage, epoch: Epoch, tokens: int, drift: float) -> Lineage:
    """A turn was answered on the lossy lineage `epoch`, with `drift` expected or measured."""
    old = lineage.lossy
    if old is None or old.epoch != epoch:
        return lineage
    changed = {"tokens": tokens, "drift": old.drift + drift, "ahead": False}
    lossy = old.model_copy(update=changed)
    return lineage.model_copy(update={"lossy": lossy, "confirmed": True})


def measured(lineage: Lineage, epoch: Epoch, correction: float) -> Lineage:
    """An audit found a turn's drift to differ from what was expected by `correction`."""
    old = lineage.lossy
    if old is None or old.epoch != epoch:
        return lineage
    lossy = old.model_copy(update={"drift": old.drift + correction})
    return lineage.model_copy(update={"lossy": lossy})


def reanchored(lineage: Lineage, epoch: Epoch, tokens: int) -> Lineage:
    """An audit of a turn on `epoch` left exact KV of `tokens` tokens behind.

    A lineage that was begun after that one is another matter and stays.
    """
    lineage = _retired(lineage, ordinal(epoch))
    changed = {"exact": max(lineage.exact, tokens), "anchored": lineage.lossy is None}
    return lineage.model_copy(update=changed)


def evicted(lineage: Lineage, tokens: int) -> Lineage:
    """The worker had no more than `tokens` of the prefix left, and computed the rest again.

    A lossy lineage stays one, drift and all: behind the gap its mapped pages may still be there.
    """
    old = lineage.lossy
    if old is None:
        return lineage.model_copy(update={"exact": min(lineage.exact, tokens)})
    changed = {"tokens": min(old.tokens, tokens), "exact": min(old.exact, tokens)}
    return lineage.model_copy(update={"lossy": old.model_copy(update=changed)})


def restarted(lineage: Lineage) -> Lineage:
    """The worker lost its memory. Its namespaces are right as before, what is in them is open."""
    return lineage.model_copy(update={"confirmed": False})


def abandoned(lineage: Lineage) -> Lineage:
    """Gives up the lossy lineage, by an operator or a policy: the next turn is exact."""
    return _retired(lineage)


def _retired(lineage: Lineage, upto: int | None = None) -> Lineage:
    """Without its lossy lineage, if that is not newer than `upto` (None: in any case)."""
    old = lineage.lossy
    if upto is None:
        upto = ordinal(old.epoch) if old else 0
    retired = max(lineage.retired, upto)
    gone = old is None or ordinal(old.epoch) <= retired
    return lineage.model_copy(update={"retired": retired, "lossy": None if gone else old})
