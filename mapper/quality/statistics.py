"""Paired figures over items: every interval resamples the same items for all arms at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

DRAWS = 2000
# An interval is left out when this share of the resampled sets gives no finite value.
_TOO_MANY_UNDEFINED = 0.1

Figure = dict[str, float | list[float] | None]


def resample(items: int, seed: int = 0) -> np.ndarray:
    """Indices [DRAWS + 1, items]; the first row is the sample itself."""
    drawn = np.random.default_rng(seed).integers(0, items, (DRAWS, items))
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
    retention is the ratio of the geometric mean probabilities of a token. Items of one of the `groups` (questions about
    one passage) are resampled together.
    """

    log: bool = False
    chance: float | None = None
    sums: dict[str, list[float]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def add(self, weight: float, sums: Mapping[str, float], group: int | None = None) -> None:
        """One item; arms that are missing were not judged on it. Without a group it is one of its own."""
        for arm in (arm for arm in sums if arm not in self.sums):
            self.sums[arm] = [float("nan")] * len(self.weights)
        for arm, values in self.sums.items():
            values.append(sums.get(arm, float("nan")))
        self.weights.append(weight)
        self.groups.append(-len(self.weights) if group is None else group)

    def judged(self, *arms: str) -> np.ndarray:
        """Which items all of `arms` were judged on, [items]."""
        return np.isfinite([self.sums[arm] for arm in arms]).all(0)

    def draws(self, *arms: str, seed: int = 0) -> np.ndarray:
        """How often each item that all of `arms` were judged on is in each resampled set, [DRAWS + 1, items]; the first
        row is the sample itself."""
        judged = self.judged(*arms)
        groups, group_of = np.unique(np.array(self.groups)[judged], return_inverse=True)
        chosen = resample(len(groups), seed)
        times = np.zeros(chosen.shape)
        np.add.at(times, (np.arange(len(chosen))[:, None], chosen), 1)
        counts = np.zeros((len(chosen), len(judged)))
        counts[:, judged] = times[:, group_of]
        return counts

    def means(self, arm: str, counts: np.ndarray) -> np.ndarray:
        """The arm's mean over each row of `counts`, as `draws` gives them."""
        return counts @ np.nan_to_num(self.sums[arm]) / (counts @ np.array(self.weights))


def compare(scores: Scores, arm: str, *, native: str, source: str, zero: str) -> dict[str, Figure]:
    """What an arm keeps of the native score, each figure with its paired interval.

    Returns:
        `score`; `retention` (of the native score); `floor_normalised`: retention after taking
        off what guessing gives, or, where nothing can be guessed, what the target gives on a
        zeroed cache; `share_of_gap`: 0 is the source's own score, 1 the target's.
        None where the native score does not lie above what it is compared with.
    """
    items = int(scores.judged(arm, native, source).sum())
    if not items:
        return {"items": 0}
    draws = scores.draws(arm, native, source)
    own, best, other = (scores.means(name, draws) for name in (arm, native, source))
    result = {
        "items": items,
        "score": figure(own),
        "retention": figure(ratio(scores, own, best)),
        "share_of_gap": _between(own, best, other),
        "floor_normalised": None,
    }
    if scores.chance is not None:
        result["floor_normalised"] = _between(own, best, np.full_like(own, scores.chance))
    elif zero in scores.sums and scores.judged(arm, native, zero).any():
        draws = scores.draws(arm, native, zero)
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
    """Of the mean over tasks, each task counting alike; items are resampled within tasks, in each by other draws.

    Log-likelihoods are pooled as logarithms of retention. Tasks have to be of one kind.
    """
    owns, bests = [], []
    for seed, scores in enumerate(tasks):
        draws = scores.draws(arm, native, seed=seed)
        owns.append(scores.means(arm, draws))
        bests.append(scores.means(native, draws))
    return figure(ratio(tasks[0], np.mean(owns, axis=0), np.mean(bests, axis=0)))
