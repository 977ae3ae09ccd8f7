"""Connections to Redis that give up quickly: no turn waits for a store that is away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

_PAUSE_SECONDS = 1.0


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


class RedisDown(Exception):
    """A call failed, or was not made because one has failed a moment ago."""


class FailFast:
    """After a failure calls fail at once for a second.

    So a Redis that hangs costs a turn its timeout once and not on every call.
    """

    def __init__(
        self, failed: Callable[[str, Exception], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`failed` gets the operation and the error of each call that was made and failed."""
        self._failed = failed
        self._clock = clock
        self._until = 0.0

    @property
    def paused(self) -> bool:
        return self._clock() < self._until

    @contextlib.contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Around a call to Redis. Raises RedisDown."""
        if self.paused:
            raise RedisDown(operation)
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            self._until = self._clock() + _PAUSE_SECONDS
            self._failed(operation, error)
            raise RedisDown(operation) from error
