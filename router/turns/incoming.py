"""A turn as it came in, and what is known of it before anything is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from router.auth.keys import Principal
from router.sessions import identity
from router.sessions.base import Session, Store, StoreDown
from router.sessions.identity import Identity
from router.turns import outgoing


@dataclass(frozen=True)
class Incoming:
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    principal: Principal
    request_id: str
    received: float

    @property
    def tenant(self) -> str:
        return self.principal.tenant

    @cached_property
    def clean(self) -> dict[str, Any]:
        """The body without the gateway's own fields."""
        return outgoing.normalise(self.body)

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.clean.get("messages") or []


@dataclass(frozen=True)
class Subject:
    """Whose turn it is: the session it belongs to, if that could be found out."""

    incoming: Incoming
    identity: Identity
    store_down: bool = False

    @property
    def session(self) -> Session | None:
        return self.identity.session

    @property
    def affinity(self) -> str:
        """What keeps a session on its worker."""
        return f"{self.incoming.tenant}\0{self.identity.id}"


async def identify(store: Store, incoming: Incoming) -> Subject:
    name = identity.named(incoming.headers, incoming.body)
    try:
        found = await identity.identify(store, incoming.tenant, name, incoming.messages)
    except StoreDown:
        found = Identity(name or identity.new_id(), None, None)
        return Subject(incoming, found, store_down=True)
    return Subject(incoming, found)
