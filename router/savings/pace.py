"""How long a token takes to write, and a transfer to make, learned online."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

_WINDOW = 64
# Of shorter answers the time between tokens says little.
_MIN_TOKENS = 8
_MIN_OBSERVATIONS = 3


class DecodeModel:
    """Seconds a token, between the first event of a streamed answer and its last.

    The median of the last answers: a client that reads slowly makes some of them longer.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= _MIN_TOKENS and seconds > 0:
            self._seen.append(seconds / (tokens - 1))

    def predict(self) -> float | None:
        return median(self._seen) if len(self._seen) >= _MIN_OBSERVATIONS else None


class TransferModel:
    """What a transfer in one direction takes, and how much of what it might it carries over.

    Seconds are a + b * tokens by least squares over the last transfers, neither negative.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._shares: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, expected: int, tokens: int, seconds: float) -> None:
        """`tokens` of the `expected` ones were carried over; none when it failed."""
        if expected > 0:
            self._shares.append(min(1.0, tokens / expected))
        if tokens > 0:
            self._seen.append((tokens, seconds))

    def share(self) -> float:
        """Of the tokens that could be carried over, by experience; all of them without any."""
        return sum(self._shares) / len(self._shares) if self._shares else 1.0

    def predict(self, tokens: int) -> float | None:
        if len(self._seen) < _MIN_OBSERVATIONS:
            return None
        x = np.array([one for one, _ in self._seen], dtype=float)
        y = np.array([seconds for _, seconds in self._seen])
        spread = x - x.mean()
        slope = max(0.0, float(spread @ y / max(spread @ spread, 1.0)))
        start = max(0.0, float(y.mean() - slope * x.mean()))
        return start + slope * tokens
