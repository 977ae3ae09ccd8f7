"""Compares ways to route at equal quality: each by the cheapest mixture of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from router.offline.costmodel import CostModel
from router.offline.simulate import Turned

_ROUNDS = 1000
# Qualities by way and setting [settings] -> the quality at which to compare.
Level = Callable[[dict[str, np.ndarray]], float]


@dataclass
class Tried:
    """Cost and quality of every setting by session: [settings][sessions]."""

    cost: list[list[float]] = field(default_factory=list)
    quality: list[list[float]] = field(default_factory=list)

    def add(self, runs: list[list[Turned]], costs: CostModel) -> None:
        """Further sessions, of equally many turns, run with each of the settings in order."""
        for place, run in enumerate(runs):
            if len(self.cost) <= place:
                self.cost.append([])
                self.quality.append([])
            names = [turn.session for turn in run]
            _, session = np.unique(names, return_inverse=True)
            turns = np.bincount(session)
            spent = [1e6 * (turn.money + costs.second_price * turn.seconds) for turn in run]
            self.cost[place] += (np.bincount(session, spent) / turns).tolist()
            right = [turn.quality for turn in run]
            self.quality[place] += (np.bincount(session, right) / turns).tolist()

    def points(self) -> list[tuple[float, float]]:
        return [
            (float(np.mean(cost)), float(np.mean(right)))
            for cost, right in zip(self.cost, self.quality, strict=True)
        ]


def levels(low: str, high: str, share: float) -> Level:
    """So much of the way from the quality of one way, which has one setting, to another's."""
    return lambda q: float((1 - share) * q[low][0] + share * q[high][0])


def compare_at(tried: dict[str, Tried], ours: str, other: str, level: Level) -> dict[str, float]:
    """What `other` costs more a turn than `ours` at a quality, with a 95 % interval.

    Paired: sessions are drawn with replacement, the same ones for both, and curves and
    level are those of the draw. Settings may be mixed, each for a share of the sessions, and
    with those of ways that have one setting only, which anybody can use.
    """
    cost = {name: np.array(one.cost) for name, one in tried.items()}
    right = {name: np.array(one.quality) for name, one in tried.items()}
    for_all = [name for name, one in cost.items() if len(one) == 1]

    def at(rows: np.ndarray) -> tuple[float, float]:
        q = {name: one[:, rows].mean(1) for name, one in right.items()}
        c = {name: one[:, rows].mean(1) for name, one in cost.items()}

        def cheapest(name: str) -> float:
            names = [name] if name in for_all else [name, *for_all]
            points = [np.concatenate([one[n] for n in names]) for one in (q, c)]
            return cost_at(*points, level(q))

        return cheapest(ours), cheapest(other)

    n = next(iter(cost.values())).shape[1]
    rng = np.random.default_rng(0)
    draws = [at(rng.integers(0, n, n)) for _ in range(_ROUNDS)]
    low, high = np.percentile([theirs - mine for mine, theirs in draws], [2.5, 97.5])
    mine, theirs = at(np.arange(n))
    return {
        "ours": mine, "other": theirs, "difference": theirs - mine,
        "low": float(low), "high": float(high),
    }  # fmt: skip


def cost_at(quality: np.ndarray, cost: np.ndarray, wanted: float) -> float:
    """The least cost of a mixture of points [n] with a wanted mean quality; of the best point's
    quality where none has more."""
    hull: list[tuple[float, float]] = []
    for q, c in sorted(zip(quality.tolist(), cost.tolist(), strict=True)):
        while len(hull) > 1 and _above(hull[-2], hull[-1], (q, c)):
            hull.pop()
        if hull and hull[-1][0] == q:
            continue
        hull.append((q, c))
    # More quality for less money is always welcome.
    while len(hull) > 1 and hull[0][1] >= hull[1][1]:
        hull.pop(0)
    return float(np.interp(wanted, *zip(*hull, strict=True)))


def _above(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]):
    """Whether the middle point lies on or above the line between the others."""
    (q0, c0), (q1, c1), (q2, c2) = left, middle, right
    return (c1 - c0) * (q2 - q0) >= (c2 - c0) * (q1 - q0)
