"""Paired figures over items: every interval resamples the same items for all arms at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

DRAWS = 2000
# An interval is left out when this share of the resampled sets gives no finite value.
_TOO_MANY_UNDEFINED = 0.1

Figure = dict[str, float | list[float] | None]


def resample(items: int) -> np.ndarray:
    """Indices [DRAWS + 1, items]; the first row is the sample itself."""
    drawn = np.random.default_rng(0).integers(0, items, (DRAWS, items))
    return np.concatenate((np.arange(items)[None], drawn))


def figure(values: np.ndarray) -> Figure:
    """Point estimate and 95 % interval of a statistic of `resample`d items."""
    point, drawn = values[0], values[1:]
    finite = drawn[np.isfinite(drawn)]
    enough = len(finite) >= (1 - _TOO_MANY_UNDEFINED) * len(drawn)
    interval = [float(value) for value in np.percentile(finite, [2.5, 97.5])] if enough else None
    return {"value": float(point) if np.isfinite(point) else None, "interval": interval}


@dataclass
class Scores:
    """One task's scores by arm: a sum and a weight for each item, NaN where it was not judged.

    The mean of an arm is the sum of sums over the sum of weights: right answers have the weight
    1, log-likelihoods that of their tokens. `log`: the scores are log-likelihoods, whose
    retention is the ratio of the geometric mean probabilities of a token.
    """

    log: bool = False
    chance: float | None = None
    sums: dict[str, list[float]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    def add(self, weight: float, sums: Mapping[str, float]) -> None:
        """One item; arms that are missing were not judged on it."""
        for arm in (arm for arm in sums if arm not in self.sums):
            self.sums[arm] = [float("nan")] * len(self.weights)
        for arm, values in self.sums.items():
            values.append(sums.get(arm, float("nan")))
        self.weights.append(weight)

    def judged(self, *arms: str) -> np.ndarray:
        """Items that all of `arms` were judged on."""
        return np.isfinite([self.sums[arm] for arm in arms]).all(0).nonzero()[0]

    def means(self, arm: str, items: np.ndarray) -> np.ndarray:
        """The arm's mean on each row of `items` [draws, items]."""
        weights = np.array(self.weights)[items].sum(1)
        return np.array(self.sums[arm])[items].sum(1) / weights


def compare(scores: Scores, arm: str, *, native: str, source: str, zero: str) -> dict[str, Figure]:
    """What an arm keeps of the native score, each figure with its paired interval.

    Returns:
        `score`; `retention` (of the native score); `floor_normalised`: retention after taking
        off what guessing gives, or, where nothing can be guessed, what the target gives on a
        zeroed cache; `share_of_gap`: 0 is the source's own score, 1 the target's.
        None where the native score does not lie above what it is compared with.
    """
    items = scores.judged(arm, native, source)
    if not len(items):
        return {"items": 0}
    draws = items[resample(len(items))]
    own, best, other = (scores.means(name, draws) for name in (arm, native, source))
    result = {
        "items": len(items),
        "score": figure(own),
        "retention": figure(ratio(scores, own, best)),
        "share_of_gap": _between(own, best, other),
        "floor_normalised": None,
    }
    if scores.chance is not None:
        result["floor_normalised"] = _between(own, best, np.full_like(own, scores.chance))
    elif zero in scores.sums and len(both := scores.judged(arm, native, zero)):
        draws = both[resample(len(both))]
        result["floor_normalised"] = _between(
            *(scores.means(name, draws) for name in (arm, native, zero))
        )
    return result


def ratio(scores: Scores, own: np.ndarray, best: np.ndarray) -> np.ndarray:
    if scores.log:
        return np.exp(own - best)
    with np.errstate(divide="ignore", invalid="ignore"):
        return own / best


def _between(own: np.ndarray, best: np.ndarray, floor: np.ndarray) -> Figure | None:
    """Where `own` lies between `floor` (0) and `best` (1)."""
    if best[0] <= floor[0]:
        return None
    gap = best - floor
    with np.errstate(divide="ignore", invalid="ignore"):
        return figure(np.where(gap > 0, (own - floor) / gap, np.nan))


def pooled_retention(tasks: list[Scores], arm: str, native: str) -> Figure:
    """Of the mean over tasks, each task counting alike; items are resampled within tasks.

    Log-likelihoods are pooled as logarithms of retention. Tasks have to be of one kind.
    """
    owns, bests = [], []
    for scores in tasks:
        items = scores.judged(arm, native)
        draws = items[resample(len(items))]
        owns.append(scores.means(arm, draws))
        bests.append(scores.means(native, draws))
    return figure(ratio(tasks[0], np.mean(owns, axis=0), np.mean(bests, axis=0)))
