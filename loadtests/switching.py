"""What the switch term of a policy is worth: four ways to route the same mixed sessions.

    baton outcomes DATA outcomes.jsonl
    python -m loadtests.switching outcomes.jsonl build/switching

Scores are fitted on one part of the questions, every policy's own threshold is chosen on
sessions made of a second part, and all are judged on sessions made of a third. Each policy
gets the same choice: the cheapest setting that reaches always-large's quality on the second
part, else its best. A second table compares at equal quality on the third part itself.
Writes report.json and report.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import policies
from loadtests.sessions import mixed_sessions
from policies import Policy
from policies.features import features
from policies.logistic import Calibrated
from policies.tasks import task_class
from router.offline.costmodel import DEMO, CostModel, read_costs
from router.offline.records import Item, read_items
from router.offline.replay import summarise
from router.offline.sessions import ReplayTurn
from router.offline.simulate import Turned, simulate
from router.offline.tune import learned, split

# Expected gains at which the policies without a switch term may escalate, and values of a
# right answer (in the currency of the prices) for the one with it.
THRESHOLDS = tuple(np.round(np.arange(-0.1, 0.31, 0.025), 3).tolist())
VALUES = tuple(np.round(np.geomspace(0.001, 0.5, 16), 6).tolist())
SMALL_FIRST = "small first, escalates without a map"
NO_TERM = "same, without the switch term"
WITH_TERM = "switch economics"
LARGE = "always large"
PINNED: dict[str, Policy] = {
    LARGE: policies.from_dict({"kind": "pinned", "tier": "large"}),
    "always small": policies.from_dict({"kind": "pinned", "tier": "small"}),
}


def compare(items: list[Item], costs: CostModel, sessions: int, seed: int) -> dict[str, Any]:
    train, calibrate, test = split(items, seed)
    scores = {s.key: s.model for s in learned(train, calibrate, test, False) if s.key}
    families = {
        WITH_TERM: [(value, adaptive(scores, costs, value=value)) for value in VALUES],
        NO_TERM: [(bar, adaptive(scores, costs, threshold=bar)) for bar in THRESHOLDS],
        SMALL_FIRST: [
            (bar, adaptive(scores, costs, threshold=bar, kv="native")) for bar in THRESHOLDS
        ],
    }
    choice = known(mixed_sessions(calibrate, sessions, seed), scores["classifier"])
    held_out = known(mixed_sessions(test, sessions, seed + 1), scores["classifier"])
    wanted = quality(simulate(choice, PINNED[LARGE], costs))
    settings = {
        name: cheapest({at: simulate(choice, one, costs) for at, one in family}, costs, wanted)
        for name, family in families.items()
    }
    tried = {
        name: {at: simulate(held_out, one, costs) for at, one in family}
        for name, family in families.items()
    }
    runs = {name: tried[name][settings[name]] for name in families}
    runs |= {name: simulate(held_out, policy, costs) for name, policy in PINNED.items()}
    return {
        "sessions": sessions,
        "turns": len(runs[LARGE]),
        "wanted_quality": wanted,
        "settings": settings,
        "policies": summarise(runs, costs),
        "at_equal_quality": {
            name: equal_quality(tried[WITH_TERM], runs[name], costs)
            for name in (NO_TERM, SMALL_FIRST, LARGE)
        },
        "curves": {
            name: [(at, total(run, costs), quality(run)) for at, run in one.items()]
            for name, one in tried.items()
        },
    }


def known(
    sessions: dict[str, list[ReplayTurn]], classifier: Calibrated
) -> dict[str, list[ReplayTurn]]:
    """The same turns with what every policy would find in the text, found once."""

    def look(turn: ReplayTurn) -> ReplayTurn:
        seen = turn.as_turn()
        task = task_class(seen)
        gain = classifier.gain(features(seen))
        return turn.model_copy(update={"text": "", "task": task, "gain": gain})

    return {name: [look(turn) for turn in turns] for name, turns in sessions.items()}


def equal_quality(
    tried: dict[float, list[Turned]], baseline: list[Turned], costs: CostModel
) -> dict[str, Any] | None:
    """The baseline beside the cheapest setting of `tried` with at least its quality."""
    wanted = quality(baseline)
    good = {at: run for at, run in tried.items() if quality(run) >= wanted}
    if not good:
        return None
    at = min(good, key=lambda at: total(good[at], costs))
    return {"setting": at, **summarise({WITH_TERM: good[at], "baseline": baseline}, costs)}


def adaptive(
    scores: dict[str, Calibrated],
    costs: CostModel,
    *,
    threshold: float | None = None,
    value: float | None = None,
    kv: str = "map",
) -> Policy:
    """The cascade and the classifier as fitted; the bar is a threshold or the economics."""
    data: dict[str, Any] = {
        "kind": "adaptive",
        "cascade": {"score": scores["cascade"].model_dump(), "threshold": -1},
        "stability": {"min_stay": 1, "latch_after": None},
        "kv": {"default": kv},
    }
    if value is None:
        data["threshold"] = data["cascade"]["threshold"] = threshold
    else:
        data["switching"] = {
            "value": value,
            "second_price": costs.second_price,
            "answer_tokens": 60,
            **{tier: _speeds(costs, tier) for tier in ("small", "large")},
        }
    return policies.from_dict(data)


def _speeds(costs: CostModel, tier: str) -> dict[str, float]:
    """For what the replay does not tell the policy: it tells all of it."""
    model = costs.tier(tier)
    return {
        "prompt_price": model.prompt_price,
        "completion_price": model.completion_price,
        "prefill_tokens_per_second": 1 / model.prefill_token_seconds,
        "decode_tokens_per_second": 1 / model.decode_token_seconds,
    }


def quality(run: list[Turned]) -> float:
    return float(np.mean([turn.quality for turn in run]))


def total(run: list[Turned], costs: CostModel) -> float:
    return sum(turn.money + costs.second_price * turn.seconds for turn in run)


def cheapest(tried: dict[float, list[Turned]], costs: CostModel, wanted: float) -> float:
    """The setting of the lowest total cost that has the wanted quality, else the best one."""
    good = [at for at, run in tried.items() if quality(run) >= wanted]
    if good:
        return min(good, key=lambda at: total(tried[at], costs))
    return max(tried, key=lambda at: quality(tried[at]))


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['turns']} held-out turns in {found['sessions']} sessions.",
        "",
        "| policy | money | seconds | total | quality | large | switches | prefilled | mapped "
        "| total a turn, less switch economics (95 %) | quality, less switch economics |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found["policies"].items():
        less = one["less_first"]
        lines.append(
            f"| {name} | {one['money']:.4f} | {one['seconds']:.0f} | {one['total']:.4f} "
            f"| {one['quality']:.4f} | {one['large_share']:.0%} | {one['switches']} "
            f"| {one['prefilled_tokens']:.0f} | {one['mapped_tokens']:.0f} "
            f"| {_interval(less['total'], 6)} | {_interval(less['quality'], 4)} |"
        )
    lines += [
        "",
        "Switch economics at the cheapest setting that has the other's quality on these turns:",
        "",
        "| other policy | its total | total | its quality | quality | total a turn, other less "
        "switch economics (95 %) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, pair in found["at_equal_quality"].items():
        if pair is None:
            lines.append(f"| {name} | not reached | | | | |")
            continue
        ours, theirs = pair[WITH_TERM], pair["baseline"]
        lines.append(
            f"| {name} | {theirs['total']:.4f} | {ours['total']:.4f} | {theirs['quality']:.4f} "
            f"| {ours['quality']:.4f} | {_interval(theirs['less_first']['total'], 6)} |"
        )
    return "\n".join([*lines, ""])


def _interval(one: dict[str, float], digits: int) -> str:
    return " ".join(
        f"{one[key]:+.{digits}f}{mark}"
        for key, mark in (("difference", ""), ("low", " to"), ("high", ""))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("outcomes", type=Path, help="JSONL as `baton outcomes` writes it")
    parser.add_argument("out", type=Path, help="folder for the report")
    parser.add_argument("--costs", type=Path, default=DEMO, help="cost model of `baton replay`")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    items, _ = read_items(arguments.outcomes)
    found = compare(items, read_costs(arguments.costs), arguments.sessions, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "report.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
