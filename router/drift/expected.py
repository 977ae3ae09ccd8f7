"""What a turn on mapped KV is charged until its own drift has been measured."""

from __future__ import annotations

from collections import deque
from statistics import fmean

# Audited turns that the expectation looks back on.
_WINDOW = 32


class Expected:
    """The mean of the last audited turns' drift, by direction; `prior` before there are any."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._seen: dict[str, deque[float]] = {
            direction: deque(maxlen=_WINDOW) for direction in ("up", "down")
        }

    def nats(self, direction: str) -> float:
        seen = self._seen[direction]
        # The prior counts as one observation. A negative mean is noise around nothing.
        return max(0.0, fmean([self._prior, *seen]))

    def observe(self, direction: str, nats: float) -> None:
        self._seen[direction].append(nats)
