"""A circuit breaker: closed, open after repeated failures, half open for one trial."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "half_open", "open"]


class Breaker:
    """Runs on a monotonic clock, so that a step of the wall clock changes nothing."""

    def __init__(
        self,
        failures: int = 5,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._seconds = seconds
        self._clock = clock
        self._failures = 0
        self._retry_at: float | None = None
        self._trial = False

    @property
    def state(self) -> State:
        if self._retry_at is None:
            return "closed"
        return "half_open" if self._trial or self._clock() >= self._retry_at else "open"

    def allows(self) -> bool:
        """Whether a request may go through now; does not claim the trial."""
        return self._retry_at is None or (self._clock() >= self._retry_at and not self._trial)

    def start(self) -> None:
        """A request goes out. While half open it is the one trial."""
        if self._retry_at is not None:
            self._trial = True

    def success(self) -> None:
        self._failures = 0
        self._retry_at = None
        self._trial = False

    def failure(self) -> None:
        self._failures += 1
        if self._trial or self._failures >= self._limit:
            # Jitter keeps several gateways from trying at the same moment.
            self._retry_at = self._clock() + self._seconds * random.uniform(0.9, 1.1)
        self._trial = False

    def abandon(self) -> None:
        """The request ended without saying anything about the worker (the client left)."""
        self._trial = False
