"""Conformal risk control: a threshold whose loss of quality holds for new sessions, in expectation."""

from __future__ import annotations

import numpy as np

ASSUMPTION = (
    "Holds on average over new sessions, if these are exchangeable with the sessions it was "
    "set on: same tenants, tasks and models. It says nothing of one session, nor of traffic "
    "that has changed since."
)


def threshold(
    score: np.ndarray, gap: np.ndarray, session: np.ndarray, limit: float
) -> float | None:
    """The highest threshold whose expected loss per session is at most `limit`.

    `score` and `gap` [n] are of turns of the calibration sessions; turns with a score above
    the threshold go to the large model. A session's loss is the mean, over its turns, of the
    quality that the large model would have added and that routing forgoes: between 0 and 1,
    and never larger at a lower threshold. With k sessions of mean loss R(t), the threshold
    is the highest t with (k R(t) + 1) / (k + 1) <= limit (Angelopoulos, Bates, Fisch, Lei
    and Schuster, Conformal Risk Control, 2022, theorem 1). None when no threshold will do,
    which is so for any `limit` below 1 / (k + 1).
    """
    _, place = np.unique(session, return_inverse=True)
    k = place.max() + 1
    turns = np.bincount(place)
    # Sending the highest scores first: the loss left at each threshold.
    loss = np.maximum(gap, 0) / turns[place]
    order = np.argsort(-score, kind="stable")
    left = loss.sum() - np.cumsum(loss[order])
    ordered = score[order]
    candidates = [(float(ordered[0]), float(loss.sum()))]
    candidates += [
        (float(ordered[i + 1]), float(left[i]))
        for i in range(len(ordered) - 1)
        if ordered[i + 1] < ordered[i]
    ]
    # Below all scores nothing is lost.
    candidates.append((float(np.nextafter(ordered[-1], -np.inf)), 0.0))
    for value, total in candidates:
        if (total + 1) / (k + 1) <= limit:
            return value
    return None


def session_loss(
    score: np.ndarray, gap: np.ndarray, session: np.ndarray, value: float
) -> np.ndarray:
    """The loss [k] of each session at a threshold."""
    _, place = np.unique(session, return_inverse=True)
    lost = np.where(score > value, 0.0, np.maximum(gap, 0))
    return np.bincount(place, weights=lost) / np.bincount(place)
