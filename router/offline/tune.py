"""`baton tune`: fits the scores, judges them on held-out sessions, sets the thresholds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import policies
from policies.cascade import SIGNALS, score_features
from policies.features import features
from policies.logistic import Calibrated
from router.offline import curves, edit, fit, guarantee, report
from router.offline.curves import Curve, Outcomes
from router.offline.records import Item, RecordError, read_items

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
# A signal that fewer turns than this share have is not learned from.
_PRESENT = 0.9


@dataclass(frozen=True)
class Goal:
    """What the threshold is chosen for; exactly one is set."""

    large_share: float | None = None
    # Share of the large model's quality.
    quality: float | None = None
    # Expected loss of quality per session, by conformal risk control.
    loss: float | None = None

    def threshold(self, score: np.ndarray, items: list[Item]) -> float | None:
        """On the sessions set apart for this. None when the goal cannot be had."""
        outcomes = as_outcomes(items)
        if self.loss is not None:
            return guarantee.threshold(score, outcomes.gap, outcomes.session, self.loss)
        share = self.large_share
        if share is None:
            place = curves.curve(score, outcomes).reach(self.quality * outcomes.large.mean())
            if place is None:
                return None
        else:
            place = round(share * len(score))
        ordered = np.sort(score)[::-1]
        if place >= len(ordered):
            return float(np.nextafter(ordered[-1], -np.inf))
        return float(ordered[place])

    def words(self) -> str:
        if self.loss is not None:
            return f"expected loss per session at most {self.loss:g}"
        if self.quality is not None:
            return f"at least {self.quality:.0%} of the large model's quality"
        return f"{self.large_share:.0%} of turns to the large model"


@dataclass
class Score:
    """One way to rank turns: how it was made, and its values on both parts."""

    name: str
    calibrate: np.ndarray
    test: np.ndarray
    model: Calibrated | None = None
    training: dict[str, Any] = field(default_factory=dict)
    # Read off the small model's answer, so that this is paid for in any case.
    cascade: bool = False
    # The section of a policy that can use this score.
    key: str | None = None


def tune(
    source: Path,
    out: Path,
    policy: Path,
    goal: Goal,
    small_cost: float,
    prompt_logprob: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes report.json, report.md, curves.png, the scores and policy.yaml into `out`.

    Half of the sessions train, a fifth sets thresholds, the rest judges. With
    `prompt_logprob` the policy gets the classifier that reads it. Raises RecordError.
    """
    items, skipped = read_items(source)
    train, calibrate, test = split(items, seed)
    scores = [*learned(train, calibrate, test, prompt_logprob), *_single(calibrate, test)]
    outcomes = as_outcomes(test)
    lines = {
        score.name: curves.curve(score.test, outcomes, small_cost, score.cascade)
        for score in scores
    }
    lines["oracle"] = curves.oracle(outcomes, small_cost)
    lines["shuffled"] = curves.shuffled(outcomes, small_cost)
    found: dict[str, Any] = {
        "source": source.name,
        "turns": {
            "train": len(train), "calibrate": len(calibrate), "test": len(test), "skipped": skipped,
        },
        "goal": goal.words(),
        "small_cost": small_cost,
        "quality": _qualities(outcomes),
        "by_task": _by_task(test, outcomes),
        "oracle": curves.summary(lines["oracle"], outcomes),
        "shuffled": curves.summary(lines["shuffled"], outcomes),
        "scores": {
            score.name: _judge(score, lines[score.name], outcomes, goal, calibrate)
            for score in scores
        },
    }  # fmt: skip
    if goal.loss is not None:
        found["assumption"] = guarantee.ASSUMPTION
    out.mkdir(parents=True, exist_ok=True)
    found["written"] = _write_policy(scores, found, policy, out)
    (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "report.md").write_text(report.markdown(found))
    report.plot(lines, out / "curves.png")
    return found


def split(items: list[Item], seed: int) -> tuple[list[Item], list[Item], list[Item]]:
    """Train, calibrate, test: 50, 20 and 30 % of the sessions, by their hash."""
    parts: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
    for item in items:
        digest = hashlib.sha256(f"{seed}\0{item.group}".encode()).digest()
        place = int.from_bytes(digest[:8]) / 2**64
        parts[0 if place < 0.5 else 1 if place < 0.7 else 2].append(item)
    for name, part in zip(("train", "calibrate", "test"), parts, strict=True):
        if len({item.group for item in part}) < 5:
            raise RecordError(
                f"{len(items)} turns are too few: {len(part)} for the part to {name} on"
            )
    return parts


def as_outcomes(items: list[Item]) -> Outcomes:
    _, session = np.unique([item.group for item in items], return_inverse=True)
    return Outcomes(
        np.array([item.small.quality for item in items]),
        np.array([item.large.quality for item in items]),
        session,
        np.array([item.task for item in items]),
    )


def learned(
    train: list[Item], calibrate: list[Item], test: list[Item], prompt_logprob: bool
) -> list[Score]:
    """Classifiers from the turn alone, and a cascade from the small model's answer."""
    parts = (train, calibrate, test)
    made = [_classifier("classifier", parts, prompt_logprob=False)]
    if _mostly(train, lambda item: item.prompt_logprob):
        made.append(_classifier("classifier with prompt log-probability", parts, True))
    elif prompt_logprob:
        raise RecordError("prompt_logprob: too few turns have it for a classifier to use it")
    scores = [score for score, _ in made]
    classifier, unseen = made[-1 if prompt_logprob else 0]
    classifier.key = "classifier"
    names = [n for n in SIGNALS if _mostly(train, lambda item, n=n: item.signals.get(n))]
    if names:
        prior = (unseen, classifier.calibrate, classifier.test)
        scores.append(_cascade(names, parts, prior))
    return scores


def _classifier(
    name: str, parts: tuple[list[Item], ...], prompt_logprob: bool
) -> tuple[Score, np.ndarray]:
    """The score, and its gains for the training turns by models that had not seen them."""
    rows = [[_features(item, prompt_logprob) for item in part] for part in parts]
    known = [item.prompt_logprob for item in parts[0] if item.prompt_logprob is not None]
    fill = {"prompt_logprob": float(np.mean(known))} if prompt_logprob else {}
    outcomes = as_outcomes(parts[0])
    model, unseen, training = fit.fit(rows[0], outcomes.gap, outcomes.session, fill)
    values = [np.array([model.gain(row) for row in part]) for part in rows[1:]]
    return Score(name, *values, model, training), unseen


def _features(item: Item, prompt_logprob: bool) -> dict[str, float]:
    turn = item.as_turn()
    if not prompt_logprob:
        turn = turn.model_copy(update={"prompt_logprob": None})
    return features(turn)


def _cascade(
    names: list[str], parts: tuple[list[Item], ...], prior: tuple[np.ndarray, ...]
) -> Score:
    """The inputs that tell most of training turns left out: one signal or all, with or
    without the classifier's gain."""
    outcomes = as_outcomes(parts[0])
    nothing = [np.full(len(part), None) for part in parts]
    best: tuple[float, Score] | None = None
    for chosen in [[one] for one in names] + ([names] if len(names) > 1 else []):
        for gains in (prior, nothing):
            rows = [
                [
                    score_features({n: item.signals.get(n) for n in chosen}, gain)
                    for item, gain in zip(part, of_part, strict=True)
                ]
                for part, of_part in zip(parts, gains, strict=True)
            ]
            known = {key for row in rows[0] for key in row}
            fill = {key: float(np.median([r[key] for r in rows[0] if key in r])) for key in known}
            model, _, training = fit.fit(rows[0], outcomes.gap, outcomes.session, fill)
            loss = min(training["log_loss_left_out"].values())
            if best is None or loss < best[0]:
                values = [np.array([model.gain(row) for row in part]) for part in rows[1:]]
                training["inputs"] = sorted(known)
                best = loss, Score("cascade", *values, model, training, True, "cascade")
    return best[1]


def _single(calibrate: list[Item], test: list[Item]) -> list[Score]:
    """Baselines of one number each: longer prompts, and less confident answers, to large."""

    def score(name: str, value: Any, cascade: bool = False) -> Score:
        values = [np.array([value(item) for item in part]) for part in (calibrate, test)]
        return Score(name, *values, cascade=cascade)

    scores = [score("prompt length", lambda item: float(item.length))]
    for name in ("low_logprob", "mean_logprob", "margin"):
        if all(item.signals.get(name) is not None for item in (*calibrate, *test)):
            scores.append(score(f"{name} alone", lambda item, n=name: -item.signals[n], True))
    if all(item.prompt_logprob is not None for item in (*calibrate, *test)):
        scores.append(score("prompt log-probability alone", lambda item: -item.prompt_logprob))
    return scores


def _mostly(items: list[Item], value: Any) -> bool:
    return sum(value(item) is not None for item in items) >= _PRESENT * len(items)


def _judge(
    score: Score, line: Curve, outcomes: Outcomes, goal: Goal, calibrate: list[Item]
) -> dict[str, Any]:
    found = {
        **curves.summary(line, outcomes),
        "auc": _auc(score.test, outcomes.gap),
        "against_shuffled": {
            "area": curves.area_against_shuffled(score.test, outcomes),
            **{f"{s:.0%}": curves.against_shuffled(score.test, outcomes, s) for s in SHARES},
        },
        "against_shuffled_within_task": {
            f"{s:.0%}": curves.against_shuffled(score.test, outcomes, s, within_task=True)
            for s in SHARES
        },
    }
    threshold = goal.threshold(score.calibrate, calibrate)
    if threshold is not None:
        picked = score.test > threshold
        loss = guarantee.session_loss(score.test, outcomes.gap, outcomes.session, threshold)
        found["at_threshold"] = {
            "threshold": threshold,
            "large_share": float(picked.mean()),
            "quality": float(np.where(picked, outcomes.large, outcomes.small).mean()),
            "session_loss": float(loss.mean()),
        }
    if score.model is not None:
        found["training"] = score.training
        found["calibration"] = _reliability(score.test, outcomes.gap)
    return found


def _qualities(outcomes: Outcomes) -> dict[str, float]:
    gap = outcomes.gap
    return {
        "small": float(outcomes.small.mean()),
        "large": float(outcomes.large.mean()),
        "large_better": float((gap > 0).mean()),
        "small_better": float((gap < 0).mean()),
        **{f"gap_{k}": v for k, v in curves.interval(gap, outcomes.session, 2000, 0).items()},
    }


def _by_task(items: list[Item], outcomes: Outcomes) -> dict[str, dict[str, float]]:
    return {
        str(task): {
            "turns": int((outcomes.task == task).sum()),
            "small": float(outcomes.small[outcomes.task == task].mean()),
            "large": float(outcomes.large[outcomes.task == task].mean()),
        }
        for task in np.unique(outcomes.task)
    }


def _auc(score: np.ndarray, gap: np.ndarray) -> float | None:
    """Chance that a turn where large is better ranks above one where it is not; 0.5 is chance."""
    from sklearn.metrics import roc_auc_score

    better = gap > 0
    return float(roc_auc_score(better, score)) if 0 < better.sum() < len(better) else None


def _reliability(predicted: np.ndarray, gap: np.ndarray) -> list[dict[str, float]]:
    """Mean predicted and real gain in five groups of equal size, by prediction."""
    groups = np.array_split(np.argsort(predicted, kind="stable"), 5)
    return [
        {"predicted": float(predicted[g].mean()), "real": float(gap[g].mean()), "turns": len(g)}
        for g in groups
    ]


def _write_policy(
    scores: list[Score], found: dict[str, Any], policy: Path, out: Path
) -> dict[str, Any]:
    """The policy with the learned scores and their thresholds in the places it has for them."""
    text = policy.read_text(encoding="utf-8")
    places = {
        "classifier": ("classifier.model", "threshold"),
        "cascade": ("cascade.score", "cascade.threshold"),
    }
    written: dict[str, Any] = {}
    for score in scores:
        if score.key is None:
            continue
        file = f"{score.key}.json"
        (out / file).write_text(json.dumps(score.model.model_dump(), indent=1) + "\n")
        threshold = found["scores"][score.name].get("at_threshold", {}).get("threshold")
        model_key, threshold_key = places[score.key]
        if edit.has(text, model_key):
            text = edit.put(text, model_key, file)
            written[model_key] = file
            if threshold is not None:
                written[threshold_key] = round(min(1.0, max(-1.0, threshold)), 6)
                text = edit.put(text, threshold_key, written[threshold_key])
    target = out / "policy.yaml"
    target.write_text(text, encoding="utf-8")
    policies.from_file(target)
    return written
