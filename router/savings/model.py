"""How long a worker needs to prefill, learned online from native prefills."""

from __future__ import annotations

from collections import deque

import numpy as np

# Older observations than this many are forgotten.
_WINDOW = 256
# Fewer observations than this, or all of nearly one length, make no prediction.
_MIN_OBSERVATIONS = 4
_MIN_SPREAD = 1.5
_RIDGE = 1e-4
# Waiting makes an observation longer and nothing makes one shorter: what lies further
# above the fit than this share counts the less, the further.
_TOLERANCE = 0.1
_ROUNDS = 8
# Tokens are counted in thousands and products in millions, so that the columns are of
# one size and one ridge fits both.
_SCALE = np.array([1.0, 1e-3, 1e-6])


class PrefillModel:
    """seconds = a + b * uncached + c * uncached * (cached + uncached / 2), none negative.

    The last product is what attention costs: every new token looks at everything cached
    and at the new tokens before it.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)
        self._beta: np.ndarray | None = None

    @property
    def ready(self) -> bool:
        lengths = [uncached for uncached, _, _ in self._seen]
        return len(lengths) >= _MIN_OBSERVATIONS and max(lengths) >= _MIN_SPREAD * min(lengths)

    def observe(self, uncached: int, cached: int, seconds: float) -> None:
        """One prefill that had the worker to itself."""
        if uncached > 0 and seconds > 0:
            self._seen.append((uncached, cached, seconds))
            self._beta = None

    def predict(self, tokens: int, cached: int, rest: int) -> float | None:
        """Seconds to prefill `tokens` after `cached` ones, when `rest` more come anyway."""
        if not self.ready:
            return None
        if self._beta is None:
            self._beta = _fit(self._seen)
        whole = _features(tokens + rest, cached) @ self._beta
        apart = _features(rest, cached + tokens) @ self._beta if rest else 0.0
        return max(0.0, float(whole - apart))


def _features(uncached: int, cached: int) -> np.ndarray:
    return np.array([1.0, uncached, uncached * (cached + uncached / 2)]) * _SCALE


def _fit(seen: deque[tuple[int, int, float]]) -> np.ndarray:
    """Least squares on relative errors, re-weighted so that waiting does not count as work."""
    x = np.array([_features(uncached, cached) for uncached, cached, _ in seen])
    seconds = np.array([value for _, _, value in seen])
    x, y = x / seconds[:, None], np.ones(len(seconds))
    weights = np.ones(len(seconds))
    beta = np.zeros(3)
    for _ in range(_ROUNDS):
        beta = _non_negative((x * weights[:, None]).T @ x, (x * weights[:, None]).T @ y)
        above = y - x @ beta
        weights = np.where(above > _TOLERANCE, _TOLERANCE / np.maximum(above, _TOLERANCE), 1.0)
    return beta


def _non_negative(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """Ridge regression over the active columns; a column that turns negative leaves."""
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
