"""Cost-quality curves of a score, beside oracle and shuffled controls, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVELS = (0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Outcomes:
    """Of n turns: both qualities [n], the session of each as a number [n], the task of each [n]."""

    small: np.ndarray
    large: np.ndarray
    session: np.ndarray
    task: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return self.large - self.small


@dataclass(frozen=True)
class Curve:
    """Quality [n+1] when the first 0, 1, ... n turns by a score go to the large model."""

    share: np.ndarray
    quality: np.ndarray
    # What a turn costs at each share, with always large as 1.
    cost: np.ndarray

    @property
    def area(self) -> float:
        return float(np.trapezoid(self.quality, self.share))

    def at(self, share: float) -> float:
        return float(np.interp(share, self.share, self.quality))

    def reach(self, quality: float) -> int | None:
        """The first point with at least this quality."""
        good = np.flatnonzero(self.quality >= quality - 1e-12)
        return int(good[0]) if len(good) else None


def curve(
    score: np.ndarray, outcomes: Outcomes, small_cost: float = 0.0, cascade: bool = False
) -> Curve:
    """Higher scores go to the large model first; among equal ones the order says nothing.

    `small_cost` is the cost of a small turn with that of a large one as 1; in a `cascade`
    the small model is paid for escalated turns too.
    """
    order = np.argsort(-score, kind="stable")
    gap = outcomes.gap[order]
    # Equal scores share their gain evenly, whatever order they lie in.
    _, group = np.unique(-score[order], return_inverse=True)
    sizes = np.bincount(group)
    gap = (np.bincount(group, weights=gap) / sizes)[group]
    n = len(gap)
    quality = outcomes.small.mean() + np.concatenate([[0.0], np.cumsum(gap)]) / n
    share = np.arange(n + 1) / n
    return Curve(share, quality, small_cost + share * (1 if cascade else 1 - small_cost))


def oracle(outcomes: Outcomes, small_cost: float = 0.0) -> Curve:
    return curve(outcomes.gap, outcomes, small_cost)


def shuffled(outcomes: Outcomes, small_cost: float = 0.0) -> Curve:
    """The mean over all shuffles of any score: each turn is as likely as any other."""
    return curve(np.zeros(len(outcomes.small)), outcomes, small_cost)


def chosen(score: np.ndarray, share: float) -> np.ndarray:
    """Probability [n] that each turn goes to the large model when `share` of all do."""
    n = len(score)
    budget = share * n
    order = np.argsort(-score, kind="stable")
    _, group = np.unique(-score[order], return_inverse=True)
    sizes = np.bincount(group)
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    part = np.clip((budget - before) / sizes, 0, 1)[group]
    picked = np.empty(n)
    picked[order] = part
    return picked


def against_shuffled(
    score: np.ndarray,
    outcomes: Outcomes,
    share: float,
    *,
    within_task: bool = False,
    rounds: int = 2000,
    seed: int = 0,
) -> dict[str, float]:
    """Quality above the shuffled control's at the same share of large turns, with 95 % interval.

    Paired: both choose among the same turns, and whole sessions are drawn with
    replacement. The control is the mean over all shuffles of the choice: over all turns,
    or `within_task`, where the control knows the tasks and what share of each is chosen.
    """
    picked = chosen(score, share)
    control = np.full(len(score), picked.mean())
    if within_task:
        for task in np.unique(outcomes.task):
            control[outcomes.task == task] = picked[outcomes.task == task].mean()
    return interval((picked - control) * outcomes.gap, outcomes.session, rounds, seed)


def area_against_shuffled(
    score: np.ndarray, outcomes: Outcomes, rounds: int = 500, seed: int = 0
) -> dict[str, float]:
    """As above for the area under the curve, that is the mean over all shares."""

    def difference(rows: np.ndarray) -> float:
        part = _rows(outcomes, rows)
        return curve(score[rows], part).area - shuffled(part).area

    values = [
        difference(rows)
        for rows in session_draws(outcomes.session, rounds, np.random.default_rng(seed))
    ]
    low, high = np.percentile(values, [2.5, 97.5])
    estimate = difference(np.arange(len(score)))
    return {"difference": estimate, "low": float(low), "high": float(high)}


def interval(values: np.ndarray, session: np.ndarray, rounds: int, seed: int) -> dict[str, float]:
    """Mean of per-turn `values` and its bootstrap interval over sessions."""
    _, place = np.unique(session, return_inverse=True)
    total, count = np.bincount(place, weights=values), np.bincount(place)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(total), size=(rounds, len(total)))
    means = total[draws].sum(1) / count[draws].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"difference": float(values.mean()), "low": float(low), "high": float(high)}


def session_draws(session: np.ndarray, rounds: int, rng: np.random.Generator):
    """Row numbers of `rounds` resamples of whole sessions."""
    order = np.argsort(session, kind="stable")
    _, starts = np.unique(session[order], return_index=True)
    members = np.split(order, starts[1:])
    for _ in range(rounds):
        yield np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])


def summary(line: Curve, outcomes: Outcomes) -> dict:
    """Area, its normalised form, and the cost at which levels of quality are reached.

    `gap_recovered` is the area with always small as 0 and always large as 1; a shuffled
    score has 0.5. `of_large_quality` and `of_gap` give the cost (always large is 1) of 50,
    80 and 95 % of the large model's quality, and of the way to it from the small one's.
    """
    low, high = float(outcomes.small.mean()), float(outcomes.large.mean())
    distance = high - low

    def cost(quality: float) -> float | None:
        place = line.reach(quality)
        return None if place is None else float(line.cost[place])

    return {
        "area": line.area,
        "gap_recovered": (line.area - low) / distance if distance > 0 else None,
        "of_large_quality": {f"{level:.0%}": cost(level * high) for level in LEVELS},
        "of_gap": {
            f"{level:.0%}": cost(low + level * distance) if distance > 0 else None
            for level in LEVELS
        },
    }


def _rows(outcomes: Outcomes, rows: np.ndarray) -> Outcomes:
    return Outcomes(
        outcomes.small[rows], outcomes.large[rows], outcomes.session[rows], outcomes.task[rows]
    )
