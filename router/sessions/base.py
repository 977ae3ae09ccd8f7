"""What is kept for a session, and the interface of the stores that keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from policies import SessionView
from router.settings import Tier

VERSION = 1


class StoreDown(Exception):
    """The store cannot be reached. Turns are then answered without session state."""


class Session(BaseModel):
    # Fields that a newer gateway wrote are ignored, so that versions can run side by side.
    model_config = ConfigDict(extra="ignore")

    version: int = VERSION
    id: str
    turns: int = 0
    tier: Tier | None = None
    model: str | None = None
    # Per model the namespace it was last used with: None is exact, anything else is a
    # lossy lineage, holding mapped KV and what was computed on top of it.
    lineages: dict[str, str | None] = Field(default_factory=dict)
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

    def view(self) -> SessionView:
        return SessionView(
            turns=self.turns,
            tier=self.tier,
            switches_up=self.switches_up,
            switches_down=self.switches_down,
            lossy=self.model is not None and self.lineages.get(self.model) is not None,
            mapped_tokens=self.mapped_tokens,
        )

    def branch(self, id: str, turns: int) -> Session:
        """A new session that continues from here on another path.

        It keeps who answered last, but no lossy lineage: only exact KV is shared between
        sessions, and the workers' prefix caches share that by themselves.
        """
        return Session(id=id, turns=turns, tier=self.tier, model=self.model)


class Store(Protocol):
    """Every call may raise StoreDown. Sessions of one tenant are invisible to another."""

    async def get(self, tenant: str, id: str) -> Session | None: ...

    async def find(self, tenant: str, digest: str) -> str | None:
        """The id of the session whose conversation has this digest."""
        ...

    async def update(
        self, tenant: str, id: str, change: Callable[[Session], None], digests: list[str]
    ) -> Session:
        """Applies `change` atomically, and lets the digests lead to this session."""
        ...

    async def delete(self, tenant: str, id: str) -> bool: ...

    async def ping(self) -> bool: ...

    async def close(self) -> None: ...
