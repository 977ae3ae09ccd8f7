"""Fits the scores that policies use, with scikit-learn, and writes them as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csc_matrix, csr_matrix, vstack
from sklearn.feature_extraction import DictVectorizer
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

from policies.features import is_hashed
from policies.logistic import Calibrated

# Inverse strengths of the L2 penalty to choose from, on folds of whole sessions.
_STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_FOLDS = 5
# Enough turns for a curve of its own; fewer get the two numbers of Platt's method.
_ISOTONIC_TURNS = 5000


def fit(
    rows: Sequence[dict[str, float]],
    gap: np.ndarray,
    sessions: np.ndarray,
    fill: dict[str, float] | None = None,
) -> tuple[Calibrated, np.ndarray, dict]:
    """Logistic regression of "the large model does better" on named features.

    `gap` [n] is the large model's quality less the small one's; a turn counts (1 + gap) / 2
    for and (1 - gap) / 2 against, so that 2p - 1 estimates the gap itself. `fill` stands in
    for features that a row lacks, here and wherever the score is used. Calibrated on
    predictions of turns left out (Platt 1999; isotonic from 5,000 turns on).

    Returns the score, its gains [n] for these turns by models that had not seen them, and
    how it was fitted.
    """
    vectorizer = DictVectorizer(sparse=True)
    x = vectorizer.fit_transform([{**(fill or {}), **row} for row in rows]).tocsc()
    names = vectorizer.get_feature_names_out()
    centre, scale, useful = _scaling(x, names)
    if not len(useful):
        return _constant(gap)
    x, names, centre, scale = x[:, useful], names[useful], centre[useful], scale[useful]
    x = (x - csr_matrix(np.ones((x.shape[0], 1)) @ centre[None])).multiply(1 / scale).tocsr()
    strength, left_out, losses = _choose(x, gap, sessions)
    model = _logistic(x, gap, strength)
    slope, offset, points = _calibrate(left_out, gap)
    weights = model.coef_[0] / scale
    bias = float(model.intercept_[0] - weights @ centre)
    fitted = Calibrated(
        bias=slope * bias + offset,
        weights={
            str(name): round(float(slope * weight), 6)
            for name, weight in zip(names, weights, strict=True)
            if abs(weight) > 1e-6
        },
        fill=fill or {},
        points=points,
    )
    unseen = np.array([fitted.calibrated(p) for p in _sigmoid(slope * left_out + offset)])
    return (
        fitted,
        2 * unseen - 1,
        {
            "turns": len(gap),
            "features": len(fitted.weights),
            "penalty_c": strength,
            "log_loss_left_out": losses,
            "calibration": "isotonic" if points else "platt",
        },
    )


def _constant(gap: np.ndarray) -> tuple[Calibrated, np.ndarray, dict]:
    """Nothing varies: the mean gap for everybody."""
    mean = float(np.clip((1 + gap.mean()) / 2, 1e-6, 1 - 1e-6))
    loss = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    fitted = Calibrated(bias=float(np.log(mean / (1 - mean))), weights={})
    info = {"turns": len(gap), "features": 0, "log_loss_left_out": {"none": float(loss)}}
    return fitted, np.full(len(gap), 2 * mean - 1), info


def _scaling(x: csc_matrix, names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, spreads, and which features vary at all.

    Hashed n-grams stay as they are; everything else gets mean 0 and spread 1. A feature
    that never varies has taught nothing, so it must not speak where it does vary.
    """
    hashed = np.array([is_hashed(name) for name in names], dtype=bool)
    mean = np.asarray(x.mean(0)).ravel()
    spread = np.sqrt(np.maximum(np.asarray(x.multiply(x).mean(0)).ravel() - mean**2, 0))
    useful = np.flatnonzero(spread > 1e-6)
    return np.where(hashed, 0.0, mean), np.where(hashed, 1.0, spread), useful


def _logistic(x: csr_matrix, gap: np.ndarray, strength: float) -> LogisticRegression:
    y = np.concatenate([np.ones(len(gap)), np.zeros(len(gap))])
    weight = np.concatenate([(1 + gap) / 2, (1 - gap) / 2])
    model = LogisticRegression(C=strength, max_iter=2000)
    return model.fit(vstack([x, x]), y, sample_weight=weight)


def _choose(
    x: csr_matrix, gap: np.ndarray, sessions: np.ndarray
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The strength with the lowest loss on turns left out, and the logits of these."""
    folds = min(_FOLDS, len(np.unique(sessions)))
    best: tuple[float, float, np.ndarray] | None = None
    losses = {}
    for strength in _STRENGTHS:
        logits = np.zeros(len(gap))
        for train, test in GroupKFold(folds).split(x, groups=sessions):
            logits[test] = _logistic(x[train], gap[train], strength).decision_function(x[test])
        loss = _loss(logits, gap)
        losses[str(strength)] = loss
        if best is None or loss < best[0]:
            best = loss, strength, logits
    return best[1], best[2], losses


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _loss(logits: np.ndarray, gap: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, logits) - (1 + gap) / 2 * logits))


def _calibrate(logits: np.ndarray, gap: np.ndarray) -> tuple[float, float, tuple]:
    """(slope, offset) of the logit, and the points of a curve when there are turns enough."""
    if len(gap) >= _ISOTONIC_TURNS:
        raw = _sigmoid(logits)
        curve = IsotonicRegression(y_min=0, y_max=1).fit(raw, (1 + gap) / 2)
        xs, first = np.unique(curve.X_thresholds_, return_index=True)
        return 1.0, 0.0, tuple(zip(xs.tolist(), curve.y_thresholds_[first].tolist(), strict=True))
    platt = _logistic(csr_matrix(logits[:, None]), gap, 1e6)
    # A score that ranks the wrong way round on turns left out is of no use: it is flattened.
    slope = max(0.0, float(platt.coef_[0, 0]))
    if slope == 0.0:
        mean = (1 + gap.mean()) / 2
        return 0.0, float(np.log(mean / (1 - mean))), ()
    return slope, float(platt.intercept_[0]), ()
