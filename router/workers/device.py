"""What workers compute on. Some share it, and users go before whatever else is done there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.workers.worker import Worker


class Device:
    """One accelerator or one machine's cores, as this gateway sees them used."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._users = 0
        self._last_used = 0.0
        self._spare: set[asyncio.Timeout] = set()

    def enter(self) -> None:
        """A user's request is here: what runs in spare time ends."""
        self._users += 1
        now = asyncio.get_running_loop().time()
        while self._spare:
            self._spare.pop().reschedule(now)

    def leave(self) -> None:
        self._users -= 1
        self.seen_in_use()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def seen_in_use(self) -> None:
        """By whomever, just now."""
        self._last_used = time.monotonic()

    def idle(self, seconds: float = 0.0) -> bool:
        """Whether nobody has used it for so long, as far as this gateway knows."""
        return not self._users and time.monotonic() - self._last_used >= seconds

    @asynccontextmanager
    async def spare(self) -> AsyncIterator[None]:
        """A block that runs until a user comes, and ends with TimeoutError then."""
        if self._users:
            raise TimeoutError
        async with asyncio.timeout(None) as limit:
            self._spare.add(limit)
            try:
                yield
            finally:
                self._spare.discard(limit)
