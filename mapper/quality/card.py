"""The figures of a run by task and task class, and what an artifact may claim of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mapper.quality.divergence import Divergences
from mapper.quality.questions import SOURCE, TaskResult
from mapper.quality.statistics import Scores, compare, pooled_retention

NATIVE, ZERO = "native", "control: zero"
# Least retention that each task class should keep; a class without one claims its figure alone.
GOALS = {"choice": 0.98, "passage": 0.98, "exact": 0.95}
KL_GOAL, TOP1_GOAL = 0.03, 0.95
# What fewer questions show, luck can have shown: no goal is met by them.
FEWEST_ITEMS = 10
# With fewer right answers of the target itself there is little to keep: no goal is met by them, and of worked solutions
# the likelihood is claimed.
FEWEST_RIGHT = 10
# The task classes of routing policies, and the classes of this card that stand for each.
POLICY_CLASSES = {"quote": ("exact", "passage"), "math": ("math",), "code": ("code",)}


def task_figures(result: TaskResult) -> dict[str, Any]:
    """Every arm's figures for one task, as they go into the report."""
    scores = result.scores
    figures = {
        "class": result.task.format.task_class,
        "judge": result.task.format.judge,
        "items": len(scores.weights),
        "too_long": result.too_long,
        "arms": _arms(scores, result),
    }
    if result.lengths:
        figures["shortest_prompt"] = min(result.lengths)
        figures["median_prompt"] = float(np.median(result.lengths))
    kinds = sorted({kind for kind in result.kinds if kind})
    if kinds:
        figures["kinds"] = {kind: _arms(_only(result, kind)) for kind in kinds}
    if result.likelihood.weights:
        figures["likelihood"] = _arms(result.likelihood)
    if result.short.weights:
        figures["short"] = {"items": len(result.short.weights), "arms": _arms(result.short)}
    return figures


def _arms(scores: Scores, result: TaskResult | None = None) -> dict[str, Any]:
    figures = {}
    for arm in scores.sums:
        one = compare(scores, arm, native=NATIVE, source=SOURCE, zero=ZERO)
        if result is not None and one["items"] and result.task.format.says:
            draws = result.same.draws(arm)
            one["same_as_native"] = float(result.same.means(arm, draws)[0])
            if result.task.format.generates:
                one |= {"cut": result.cut[arm], "looping": result.looping[arm]}
        figures[arm] = one
    return figures


def _only(result: TaskResult, kind: str) -> Scores:
    chosen = [index for index, one in enumerate(result.kinds) if one == kind]
    scores = result.scores
    return Scores(
        scores.log,
        scores.chance,
        {arm: [values[index] for index in chosen] for arm, values in scores.sums.items()},
        [scores.weights[index] for index in chosen],
        [scores.groups[index] for index in chosen],
    )


def classes(results: Sequence[TaskResult], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Retention by task class and arm, over the class's tasks."""
    grouped: dict[str, list[TaskResult]] = {}
    for result in results:
        if result.scores.weights:
            grouped.setdefault(result.task.format.task_class, []).append(result)
    return {name: _class(members, arms) for name, members in grouped.items()}


def _class(members: list[TaskResult], arms: Sequence[str]) -> dict[str, Any]:
    scores = [member.scores for member in members]
    basis = "likelihood" if scores[0].log else "answers"
    solutions = [member.likelihood for member in members]
    if basis == "answers" and all(one.weights for one in solutions):
        right = sum(np.nansum(one.sums[NATIVE]) for one in scores)
        if right < FEWEST_RIGHT:
            scores, basis = solutions, "likelihood of worked solutions"
    judged = [
        arm for arm in arms if all(one.judged(arm).any() for one in scores if arm in one.sums)
    ]
    judged = [arm for arm in judged if all(arm in one.sums for one in scores)]
    points = {"native_points": float(sum(np.nansum(one.sums[NATIVE]) for one in scores))}
    return {
        "tasks": [member.task.name for member in members],
        "items": sum(len(one.weights) for one in scores),
        **(points if basis == "answers" else {}),
        "basis": basis,
        "retention": {arm: pooled_retention(scores, arm, NATIVE) for arm in judged},
    }


def claims(
    name: str, tail: int, divergences: Divergences, by_class: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """What an artifact may claim of each class: its retention, the goal, and whether it is met.

    The claim is the point estimate; the interval stands beside it.
    """
    measured = divergences[name][tail].summary()
    enough = measured["conversations"] >= FEWEST_ITEMS
    chat = {
        "retention": float(np.exp(-measured["kl"])),
        "interval": [float(np.exp(-kl)) for kl in reversed(measured["kl_interval"])],
        "kl": measured["kl"],
        "top1": measured["top1"],
        "goal": {"kl": KL_GOAL, "top1": TOP1_GOAL},
        "met": bool(enough and measured["kl"] <= KL_GOAL and measured["top1"] >= TOP1_GOAL),
        "basis": "dialogues",
        "items": measured["conversations"],
    }
    found = {"chat": chat}
    for kind, figures in by_class.items():
        one = figures["retention"].get(name)
        if one and one["value"] is not None:
            goal = GOALS.get(kind)
            enough = figures["items"] >= FEWEST_ITEMS
            enough &= figures.get("native_points", FEWEST_RIGHT) >= FEWEST_RIGHT
            found[kind] = {
                "retention": one["value"],
                "interval": one["interval"],
                "goal": goal,
                "met": None if goal is None else enough and one["value"] >= goal,
                "basis": figures["basis"],
                "items": figures["items"],
            }
    return found


def policy_retention(made: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Retention by the task classes that routing policies know, the worst class of each.

    What few questions show counts here: a class that is not named is taken for kept, and no figure should be needed to
    be careful.
    """
    retention = {"chat": made["chat"]["retention"]}
    for policy_class, members in POLICY_CLASSES.items():
        known = [made[member]["retention"] for member in members if member in made]
        if known:
            retention[policy_class] = min(known)
    return retention


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """A card after a later run: of each class the newer figures, unless they are of fewer questions.

    A run of one task takes nothing from what is known of the others. Figures at another native tail or in another
    precision are not kept.
    """
    same = ("tail", "dtype")
    measured = (old or {}).get("settings", {})
    if not old or any(measured.get(name) != new["settings"][name] for name in same):
        return new
    before, now = (
        {"chat": one["conversations"]} | {kind: of["items"] for kind, of in one["classes"].items()}
        for one in (old, new)
    )
    stays = {kind for kind, items in before.items() if items > now.get(kind, 0)}

    def both(key: str, kind_of: Callable[[str, Any], str]) -> dict[str, Any]:
        kept = {name: one for name, one in old[key].items() if kind_of(name, one) in stays}
        return {n: one for n, one in new[key].items() if kind_of(n, one) not in stays} | kept

    claims = both("claims", lambda kind, _: kind)
    chat = {key: old[key] for key in ("dialogues", "conversations") if "chat" in stays}
    return {
        **new,
        **chat,
        "retention": policy_retention(claims),
        "claims": claims,
        "classes": both("classes", lambda kind, _: kind),
        "tasks": both("tasks", lambda _, one: one["class"]),
    }


def ratios(
    divergences: Divergences, variants: Sequence[str], baseline: str | None, tail: int
) -> dict[str, Any]:
    """KL of each variant over the baseline's, and of the unmapped cache over each variant's."""
    found: dict[str, Any] = {"raw over mapped, no tail": {}}
    raw = divergences["control: raw"][1]
    for name in variants:
        found["raw over mapped, no tail"][name] = raw.kl_over(divergences[name][1])
    if baseline is not None:
        for length, label in ((1, "no tail"), (tail, f"tail {tail}")):
            found[f"over {baseline}, {label}"] = {
                name: divergences[name][length].kl_over(divergences[baseline][length])
                for name in variants
                if name != baseline
            }
    return found
