"""Session state in Redis, shared by all gateway processes."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError
from redis.exceptions import RedisError, WatchError

from router import log
from router.metrics import Metrics
from router.redis_pool import FailFast, RedisDown, connect
from router.sessions.base import VERSION, Change, Session, StoreDown, born

T = TypeVar("T")
logger = log.get("sessions")

_UPDATE_ATTEMPTS = 16
# Seconds, times the attempts so far.
_UPDATE_PAUSE = 0.005
_CONNECTIONS = 32


class RedisStore:
    def __init__(
        self, url: str, password: str | None, ttl: int, timeout: float, metrics: Metrics
    ) -> None:
        self._ttl = ttl
        self._metrics = metrics
        self._up = True
        self._fail_fast = FailFast(self._failed)
        self._redis = connect(url, password, connections=_CONNECTIONS, timeout=timeout)
        metrics.store_up.set(1)

    async def get(self, tenant: str, id: str) -> Session | None:
        raw = await self._call("get", self._redis.get, _session_key(tenant, id))
        return _parse(raw)

    async def find(self, tenant: str, digest: str) -> str | None:
        raw = await self._call("find", self._redis.get, _digest_key(tenant, digest))
        return raw.decode() if raw is not None else None

    async def update(self, tenant: str, id: str, change: Change, digests: list[str]) -> Session:
        return await self._call("update", self._update, tenant, id, change, digests, True)

    async def amend(self, tenant: str, id: str, change: Change) -> Session | None:
        return await self._call("amend", self._update, tenant, id, change, [], False)

    async def recent(
        self, tenant: str, limit: int, before: float | None = None
    ) -> list[tuple[str, float]]:
        return await self._call("recent", self._recent, tenant, limit, before)

    async def delete(self, tenant: str, id: str) -> bool:
        return bool(await self._call("delete", self._delete, tenant, id))

    async def ping(self) -> bool:
        try:
            await self._call("ping", self._redis.ping)
        except StoreDown:
            return False
        return True

    async def close(self) -> None:
        await self._redis.aclose()

    async def _update(
        self, tenant: str, id: str, change: Change, digests: list[str], create: bool
    ) -> Session | None:
        """Reads, changes and writes, and does it over when another gateway wrote in between."""
        key = _session_key(tenant, id)
        for attempt in range(_UPDATE_ATTEMPTS):
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(key)
                session = _parse(await pipe.get(key))
                if session is None:
                    if not create:
                        return None
                    session = born(id)
                change(session)
                session.revision += 1
                session.updated = time.time()
                pipe.multi()
                pipe.set(key, session.model_dump_json(), ex=self._ttl)
                pipe.zadd(_index_key(tenant), {id.encode(errors="surrogatepass"): session.updated})
                pipe.expire(_index_key(tenant), self._ttl)
                for digest in digests:
                    pipe.set(_digest_key(tenant, digest), id, ex=self._ttl)
                try:
                    await pipe.execute()
                except WatchError:
                    # Somebody else got through, so that of many one always does.
                    await asyncio.sleep(random.uniform(0, _UPDATE_PAUSE * attempt))
                    continue
                return session
        raise RedisError("the session is being changed too often")

    async def _recent(
        self, tenant: str, limit: int, before: float | None
    ) -> list[tuple[str, float]]:
        key = _index_key(tenant)
        # Sessions expire by themselves; what the index still has of them goes here.
        await self._redis.zremrangebyscore(key, "-inf", f"({time.time() - self._ttl}")
        latest = "+inf" if before is None else f"({before}"
        found = await self._redis.zrevrangebyscore(
            key, latest, "-inf", start=0, num=limit, withscores=True
        )
        return [(id.decode(errors="surrogatepass"), moment) for id, moment in found]

    async def _delete(self, tenant: str, id: str) -> int:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(_session_key(tenant, id))
            pipe.zrem(_index_key(tenant), id.encode(errors="surrogatepass"))
            deleted, _ = await pipe.execute()
        return deleted

    async def _call(
        self, operation: str, call: Callable[..., Awaitable[T]], *arguments: object
    ) -> T:
        try:
            with self._fail_fast.call(operation):
                result = await call(*arguments)
        except RedisDown as error:
            raise StoreDown(operation) from error
        self._seen(True)
        return result

    def _failed(self, operation: str, error: Exception) -> None:
        self._metrics.store_errors.labels(operation).inc()
        self._seen(False, type(error).__name__)

    def _seen(self, up: bool, error: str | None = None) -> None:
        if up != self._up:
            logger.warning("session_store", up=up, error=error)
            self._up = up
        self._metrics.store_up.set(up)


def _session_key(tenant: str, id: str) -> str:
    # Hashed, because both parts come from outside and may hold anything.
    name = hashlib.sha256(f"{len(tenant)}:{tenant}{id}".encode(errors="surrogatepass"))
    return f"baton:v{VERSION}:session:{name.hexdigest()}"


def _index_key(tenant: str) -> str:
    return f"baton:v{VERSION}:index:{hashlib.sha256(tenant.encode()).hexdigest()}"


def _digest_key(tenant: str, digest: str) -> str:
    name = hashlib.sha256(f"{len(tenant)}:{tenant}{digest}".encode())
    return f"baton:v{VERSION}:digest:{name.hexdigest()}"


def _parse(raw: bytes | None) -> Session | None:
    if raw is None:
        return None
    try:
        session = Session.model_validate_json(raw)
    except ValidationError:
        logger.warning("session_unreadable")
        return None
    return session if session.version == VERSION else None
