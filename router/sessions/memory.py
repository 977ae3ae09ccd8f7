"""Session state inside one process, for trying things out where there is no Redis."""

from __future__ import annotations

import time
from collections import OrderedDict

from router.sessions.base import Change, Session, born

_MAX_ENTRIES = 100_000


class MemoryStore:
    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        # Least recently used first; (expiry on the monotonic clock, value).
        self._sessions: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._digests: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()

    async def get(self, tenant: str, id: str) -> Session | None:
        raw = self._read(self._sessions, (tenant, id))
        return Session.model_validate_json(raw) if raw is not None else None

    async def find(self, tenant: str, digest: str) -> str | None:
        return self._read(self._digests, (tenant, digest))

    async def update(self, tenant: str, id: str, change: Change, digests: list[str]) -> Session:
        # No await between reading and writing, which makes it atomic on one loop.
        raw = self._read(self._sessions, (tenant, id))
        session = born(id) if raw is None else Session.model_validate_json(raw)
        self._change(tenant, session, change)
        for digest in digests:
            self._write(self._digests, (tenant, digest), id)
        return session

    async def amend(self, tenant: str, id: str, change: Change) -> Session | None:
        raw = self._read(self._sessions, (tenant, id))
        if raw is None:
            return None
        session = Session.model_validate_json(raw)
        self._change(tenant, session, change)
        return session

    async def recent(
        self, tenant: str, limit: int, before: float | None = None
    ) -> list[tuple[str, float]]:
        now = time.monotonic()
        found = (
            (id, Session.model_validate_json(raw).updated)
            for (owner, id), (expiry, raw) in self._sessions.items()
            if owner == tenant and expiry >= now
        )
        chosen = [one for one in found if before is None or one[1] < before]
        return sorted(chosen, key=lambda one: one[1], reverse=True)[:limit]

    async def delete(self, tenant: str, id: str) -> bool:
        return self._sessions.pop((tenant, id), None) is not None

    async def ping(self) -> bool:
        return True

    async def close(self) -> None:
        return None

    def _change(self, tenant: str, session: Session, change: Change) -> None:
        change(session)
        session.revision += 1
        session.updated = time.time()
        self._write(self._sessions, (tenant, session.id), session.model_dump_json())

    def _read(self, table: OrderedDict, key: tuple[str, str]) -> str | None:
        entry = table.get(key)
        if entry is None:
            return None
        if entry[0] < time.monotonic():
            del table[key]
            return None
        table.move_to_end(key)
        return entry[1]

    def _write(self, table: OrderedDict, key: tuple[str, str], value: str) -> None:
        table[key] = (time.monotonic() + self._ttl, value)
        table.move_to_end(key)
        while len(table) > _MAX_ENTRIES:
            table.popitem(last=False)
