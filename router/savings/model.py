"""How long a worker needs to prefill, learned online from native prefills."""

from __future__ import annotations

import numpy as np

# Weight of an observation after one newer one: about the last hundred count.
_FORGET = 0.99
# Fewer observations than this, or none with enough spread, make no prediction.
_MIN_OBSERVATIONS = 4
_MIN_SPREAD = 1.5
# An observation this many times over the prediction was waiting, not computing.
_OUTLIER = 3.0
_MIN_FOR_OUTLIERS = 8
_RIDGE = 1e-4
# Tokens are counted in thousands and products in millions, so that the columns are of
# one size and one ridge fits both.
_SCALE = np.array([1.0, 1e-3, 1e-6])


class PrefillModel:
    """seconds = a + b * uncached + c * uncached * (cached + uncached / 2), none negative.

    The last product is what attention costs: every new token looks at everything cached
    and at the new tokens before it.
    """

    def __init__(self) -> None:
        self._xx = np.zeros((3, 3))
        self._xy = np.zeros(3)
        self._beta = np.zeros(3)
        self.observations = 0
        self._least = float("inf")
        self._most = 0.0

    @property
    def ready(self) -> bool:
        spread = self._most >= _MIN_SPREAD * max(self._least, 1.0)
        return self.observations >= _MIN_OBSERVATIONS and spread

    def observe(self, uncached: int, cached: int, seconds: float) -> None:
        """One prefill that had the worker to itself."""
        if uncached <= 0 or seconds <= 0:
            return
        if self.observations >= _MIN_FOR_OUTLIERS and seconds > _OUTLIER * self._time(
            uncached, cached
        ):
            # Part of it counts, so that a worker that has become slow is learned too.
            seconds = _OUTLIER * self._time(uncached, cached)
        x = _features(uncached, cached)
        # Relative errors: a second on a long prompt is not worse than one on a short one.
        weight = 1.0 / max(seconds, 1e-3) ** 2
        self._xx = _FORGET * self._xx + weight * np.outer(x, x)
        self._xy = _FORGET * self._xy + weight * x * seconds
        self.observations += 1
        self._least = min(self._least, uncached)
        self._most = max(self._most, uncached)
        self._beta = _non_negative(self._xx, self._xy)

    def predict(self, tokens: int, cached: int, rest: int) -> float | None:
        """Seconds to prefill `tokens` after `cached` ones, when `rest` more come anyway."""
        if not self.ready:
            return None
        whole = self._time(tokens + rest, cached)
        return max(0.0, whole - (self._time(rest, cached + tokens) if rest else 0.0))

    def _time(self, uncached: int, cached: int) -> float:
        return float(_features(uncached, cached) @ self._beta)


def _features(uncached: int, cached: int) -> np.ndarray:
    return np.array([1.0, uncached, uncached * (cached + uncached / 2)]) * _SCALE


def _non_negative(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """Ridge least squares over the active columns; a column that turns negative leaves."""
    active = [0, 1, 2]
    while active:
        block = xx[np.ix_(active, active)]
        ridge = _RIDGE * np.trace(block) / len(active) * np.eye(len(active))
        solution = np.linalg.solve(block + ridge, xy[active])
        if (solution >= 0).all():
            beta = np.zeros(3)
            beta[active] = solution
            return beta
        active.pop(int(np.argmin(solution)))
    return np.zeros(3)
