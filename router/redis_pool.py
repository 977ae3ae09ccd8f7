"""Connections to Redis that give up quickly: no turn waits for a store that is away."""

from __future__ import annotations

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def connect(url: str, password: str | None, *, connections: int, timeout: float) -> redis.Redis:
    """A client with a pool of `connections`; every step of a call takes `timeout` seconds at most."""
    pool = redis.BlockingConnectionPool.from_url(
        url,
        # A burst waits for a connection rather than opening one for each of its turns.
        max_connections=connections,
        timeout=timeout,
        password=password,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        # One more try, for a pooled connection that a restarted Redis has closed.
        retry=Retry(NoBackoff(), 1),
        protocol=2,
    )
    return redis.Redis.from_pool(pool)
