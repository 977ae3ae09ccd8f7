"""Two arms of one run compared: ratios with intervals, by kind of turn and over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DRAWS = 2000
_STATISTICS = {"median": np.median, "mean": np.mean}


@dataclass(frozen=True)
class Sample:
    """One turn. Both arms of a `pair` play the same session, as the same user."""

    pair: str
    kind: str
    arm: str
    seconds: float


def compare(samples: Sequence[Sample], on: str, off: str, seed: int = 0) -> dict[str, Any]:
    """Ratios on/off of medians and of means, for each kind of turn and for `all` of them.

    `all` is the geometric mean of the kinds' ratios, each weighed by its turns: the mixture of
    long and short turns has no part in it. Intervals (95 %) are bootstrapped over pairs, so
    that the turns of a session stay together (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993). Raises ValueError when there are fewer than two pairs, or when a kind
    was not seen in both arms of a pair.
    """
    pairs = sorted({sample.pair for sample in samples})
    kinds = list(dict.fromkeys(sample.kind for sample in samples))
    if len(pairs) < 2:
        raise ValueError(f"an interval needs two pairs of sessions at least, not {len(pairs)}")
    # Seconds by kind, arm and pair.
    held: dict[tuple[str, str], list[np.ndarray]] = {
        (kind, arm): [
            np.array([s.seconds for s in samples if (s.kind, s.arm, s.pair) == (kind, arm, pair)])
            for pair in pairs
        ]
        for kind in kinds
        for arm in (on, off)
    }
    if not all(len(values) for groups in held.values() for values in groups):
        raise ValueError("each pair needs turns of all kinds in both arms")
    rng = np.random.default_rng(seed)
    draws = [rng.integers(len(pairs), size=len(pairs)) for _ in range(_DRAWS)]
    turns = np.array([sum(map(len, held[kind, on])) for kind in kinds], dtype=float)
    result: dict[str, Any] = {name: {"pairs": len(pairs)} for name in ("all", *kinds)}
    for statistic, of in _STATISTICS.items():

        def logs(chosen: np.ndarray, of: Any = of) -> np.ndarray:
            """Logarithms of the ratio for each kind of turn."""
            each = [
                [of(np.concatenate([held[kind, arm][i] for i in chosen])) for arm in (on, off)]
                for kind in kinds
            ]
            return np.log(np.array(each)) @ (1, -1)

        whole = logs(np.arange(len(pairs)))
        drawn = np.array([logs(chosen) for chosen in draws])
        weights = turns / turns.sum()
        columns = {"all": (whole @ weights, drawn @ weights)}
        columns |= {kind: (whole[i], drawn[:, i]) for i, kind in enumerate(kinds)}
        for name, (value, spread) in columns.items():
            result[name][f"ratio_of_{statistic}s"] = {
                "value": float(np.exp(value)),
                "interval": [float(x) for x in np.exp(np.quantile(spread, (0.025, 0.975)))],
            }
        for kind in kinds:
            for arm in (on, off):
                mine = result[kind].setdefault(arm, {"turns": sum(map(len, held[kind, arm]))})
                mine[f"{statistic}_seconds"] = float(of(np.concatenate(held[kind, arm])))
    return result


def within(ratio: dict[str, Any], limit: float) -> str:
    """`yes` or `no` where the interval leaves no doubt that the ratio is at most `limit`."""
    low, high = ratio["interval"]
    if high <= limit:
        return "yes"
    return "no" if low > limit else "undecided"
