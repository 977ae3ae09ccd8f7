"""What is kept for a session, and the interface of the stores that keep it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from policies import Memory, SessionView, Spent
from router.sessions.lineage import Epoch, Lineage
from router.settings import Tier

VERSION = 2
# Turns kept in the timeline; the totals go on beyond them.
TIMELINE = 64
# Upper ends, in tokens of the answer, of the parts in which drift by position is kept.
POSITIONS = (1, 2, 4, 8, 16, 32, 64)


class StoreDown(Exception):
    """The store cannot be reached. Turns are then answered without session state."""


class _Kept(BaseModel):
    # Fields that a newer gateway wrote are ignored, so that versions can run side by side.
    model_config = ConfigDict(extra="ignore")


class TurnRecord(_Kept):
    """One turn of the timeline: who answered it, on which KV, and what was found out later."""

    number: int
    # Unix time of the end of the answer.
    at: float
    tier: Tier
    model: str
    # As in the response headers x-baton-kv and x-baton-kv-reason.
    kv: str
    kv_reason: str
    # The lossy lineage it was answered on; None for exact KV.
    epoch: Epoch | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    mapped_tokens: int = 0
    # None while the worker's prefill model has too few observations.
    seconds_saved: float | None = 0.0
    # Nats per token: what was charged before it was measured, and what an audit found.
    drift_expected: float = 0.0
    drift: float | None = None
    drift_first_token: float | None = None
    # What became of its audit: measured, reanchored (exact KV without a figure), or why it
    # ended; none as long as there is nothing to tell.
    audit: str = "none"


class DriftTotals(_Kept):
    """Measured drift in one direction: sums over tokens, whole and by position in the answer."""

    turns: int = 0
    tokens: int = 0
    nats: float = 0.0
    position_tokens: list[int] = Field(default_factory=lambda: [0] * (len(POSITIONS) + 1))
    position_nats: list[float] = Field(default_factory=lambda: [0.0] * (len(POSITIONS) + 1))


class Session(_Kept):
    version: int = VERSION
    # Counts the changes; `updated` is the unix time of the last one.
    revision: int = 0
    updated: float = 0.0
    id: str
    # Told apart from an earlier session of this id, which was deleted or has expired; empty
    # as long as the session is not stored.
    born: str = ""
    turns: int = 0
    tier: Tier | None = None
    model: str | None = None
    lineages: dict[str, Lineage] = Field(default_factory=dict)
    # The highest ordinal of an epoch in this session.
    epoch: int = 0
    # Digest of the conversation up to the last answer, for requests without a session id.
    head: str | None = None
    switches_up: int = 0
    switches_down: int = 0
    mapped_tokens: int = 0
    seconds_saved: float = 0.0
    seconds_lost: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Turns in a row that the present tier has answered, what the session has cost, and what
    # its policy remembers of it.
    stay: int = 0
    spent: Spent = Spent()
    memory: Memory = Memory()
    timeline: list[TurnRecord] = Field(default_factory=list)
    drift: dict[Literal["up", "down"], DriftTotals] = Field(default_factory=dict)

    def lineage(self, model: str | None) -> Lineage:
        return self.lineages.get(model or "", Lineage())

    def view(self) -> SessionView:
        lineage = self.lineage(self.model)
        return SessionView(
            turns=self.turns,
            tier=self.tier,
            switches_up=self.switches_up,
            switches_down=self.switches_down,
            lossy=lineage.status == "lossy",
            mapped_tokens=self.mapped_tokens,
            drift=lineage.drift,
        )

    def branch(self, id: str, turns: int) -> Session:
        """A new session that continues from here on another path.

        It keeps who answered last, but no lossy lineage: only exact KV is shared between
        sessions, and the workers' prefix caches share that by themselves.
        """
        return Session(
            id=id,
            turns=turns,
            tier=self.tier,
            model=self.model,
            stay=self.stay,
            memory=self.memory,
        )


def born(id: str) -> Session:
    """A session that begins now, to be stored."""
    return Session(id=id, born=secrets.token_hex(4))


Change = Callable[[Session], None]


class Store(Protocol):
    """Every call may raise StoreDown. Sessions of one tenant are invisible to another."""

    async def get(self, tenant: str, id: str) -> Session | None: ...

    async def find(self, tenant: str, digest: str) -> str | None:
        """The id of the session whose conversation has this digest."""
        ...

    async def update(self, tenant: str, id: str, change: Change, digests: list[str]) -> Session:
        """Applies `change` atomically, and lets the digests lead to this session.

        `change` may run more than once, each time on the state as it is then.
        """
        ...

    async def amend(self, tenant: str, id: str, change: Change) -> Session | None:
        """As `update`, for a session that is there; one that has gone is not made again."""
        ...

    async def recent(
        self, tenant: str, limit: int, before: float | None = None
    ) -> list[tuple[str, float]]:
        """Ids with the time of their last change, latest first, older than `before`."""
        ...

    async def delete(self, tenant: str, id: str) -> bool: ...

    async def ping(self) -> bool: ...

    async def close(self) -> None: ...
