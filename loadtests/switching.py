"""What the switch term of a policy is worth: the same mixed sessions, routed in several ways.

    baton outcomes DATA outcomes.jsonl
    python -m loadtests.switching outcomes.jsonl build/switching

All ways have the same scores, the same cascade and the same exactness (sums and quotations
are answered from native KV); each has one knob. Questions are split in three, several
times over: the scores are fitted on one part; every way's knob is set on sessions of the
second, to the cheapest setting that has the quality of always large there; sessions of the
third judge. A second comparison is at equal quality, between settings, on the third part.
Writes report.json and report.md.
"""

from __future__ import annotations

import argparse
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import policies
from loadtests.equal_quality import Tried, compare_at, levels
from loadtests.sessions import SETTINGS, Setting, mixed_sessions
from policies import Policy, Turn
from policies.features import features
from policies.logistic import Calibrated
from policies.tasks import task_class
from router.offline import curves
from router.offline.costmodel import DEMO, CostModel, read_costs
from router.offline.records import Item, read_items
from router.offline.sessions import ReplayTurn
from router.offline.simulate import Turned, simulate
from router.offline.tables import interval, table
from router.offline.tune import learned, split

# What right answers are worth, in the currency of the prices: the knob of the switch term.
VALUES = tuple(np.geomspace(0.0008, 0.3, 12).tolist())
# The knob of the others is the gain above which a turn goes to large: these quantiles of
# the gains that the scores expect, so that it reaches from nearly none to nearly all.
QUANTILES = tuple(np.linspace(0.02, 0.98, 12).tolist())
# Shares of the way from always small's to always large's quality.
LEVELS = (0.5, 0.8, 1.0)

WITH_TERM = "switch economics"
NO_TERM = "same, without the switch term"
NO_MAP = "same, without the switch term, no map"
SMALL_FIRST = "small first, escalates without a map"
LARGE, SMALL = "always large", "always small"
# Beside what all have; "knob" stands for the setting tried.
WAYS: dict[str, dict[str, Any]] = {
    WITH_TERM: {"switching": {"value": "knob"}},
    NO_TERM: {"threshold": "knob"},
    NO_MAP: {"threshold": "knob", "kv": {"default": "native"}},
    # Large is never begun with: every turn is small's until its own answer is doubtful.
    SMALL_FIRST: {"threshold": 1, "kv": {"default": "native"}},
}
PINNED: dict[str, Policy] = {
    tier: policies.from_dict({"kind": "pinned", "tier": tier.split()[1]}) for tier in (LARGE, SMALL)
}


class Known(ReplayTurn):
    """A turn with what every policy would find in its text, found once."""

    @cached_property
    def turn_seen(self) -> Turn:
        return super().as_turn().model_copy(update={"task": self.task, "gain": self.gain})

    def as_turn(self) -> Turn:
        return self.turn_seen


def run(
    items: list[Item], costs: CostModel, setting: Setting, *, sessions: int, splits: int
) -> dict[str, Any]:
    """`sessions` in all, spread over `splits` splits of the questions."""
    each = -(-sessions // splits)
    tried: dict[str, Tried] = {name: Tried() for name in (*WAYS, *PINNED)}
    chosen: dict[str, list[Turned]] = {name: [] for name in tried}
    knobs: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(splits):
        train, tune, test = split(items, seed)
        scores = {s.key: s for s in learned(train, tune, test, False) if s.key}
        before, held_out = (
            known(mixed_sessions(part, each, 2 * seed + half, setting), scores["classifier"].model)
            for half, part in enumerate((tune, test))
        )
        right = float(np.mean([item.large.quality for item in train]))
        wanted = quality(simulate(before, PINNED[LARGE], costs))
        for name in WAYS:
            family = [
                (knob, policy(name, knob, scores, costs, right)) for knob in settings(name, scores)
            ]
            place = cheapest([simulate(before, one, costs) for _, one in family], costs, wanted)
            runs = [simulate(held_out, one, costs) for _, one in family]
            tried[name].add(runs, costs)
            chosen[name] += runs[place]
            knobs[name].append(family[place][0])
        for name, one in PINNED.items():
            only = simulate(held_out, one, costs)
            tried[name].add([only], costs)
            chosen[name] += only
    return {
        "sessions": each * splits,
        "turns": len(chosen[LARGE]),
        "splits": splits,
        "knobs": knobs,
        "ways": {
            name: {**figures(turns, costs), **less(turns, chosen[WITH_TERM], costs)}
            for name, turns in chosen.items()
        },
        "equal_quality": [
            {
                "level": level,
                "others": {
                    name: compare_at(tried, WITH_TERM, name, levels(SMALL, LARGE, level))
                    for name in (SMALL_FIRST, NO_MAP, NO_TERM, LARGE)
                    if name != LARGE or level == 1
                },
            }
            for level in LEVELS
        ],
        "curves": {name: one.points() for name, one in tried.items()},
    }


def known(
    sessions: dict[str, list[ReplayTurn]], classifier: Calibrated
) -> dict[str, list[ReplayTurn]]:
    def look(turn: ReplayTurn) -> Known:
        seen = turn.as_turn()
        found = {"task": task_class(seen), "gain": classifier.gain(features(seen))}
        return Known(**{**turn.model_dump(), **found})

    return {name: [look(turn) for turn in turns] for name, turns in sessions.items()}


def settings(name: str, scores: dict[str, Any]) -> list[float]:
    if name == WITH_TERM:
        return list(VALUES)
    gains = [scores["cascade"].calibrate]
    if name != SMALL_FIRST:
        gains.append(scores["classifier"].calibrate)
    return np.quantile(np.concatenate(gains), QUANTILES).tolist()


def policy(
    name: str, knob: float, scores: dict[str, Any], costs: CostModel, right: float
) -> Policy:
    """One of WAYS at one setting. `right` is the large model's share of right answers."""
    way = WAYS[name]
    data: dict[str, Any] = {
        "kind": "adaptive",
        "cascade": {"score": scores["cascade"].model.model_dump(), "threshold": -1},
        "stability": {"min_stay": 1, "latch_after": None},
        "kv": {"by_task": {"math": "native", "quote": "native"}, **way.get("kv", {})},
    }
    if "switching" in way:
        data["switching"] = {
            "value": knob,
            "second_price": costs.second_price,
            "answer_tokens": 60,
            "answer_quality": right,
            **{tier: _speeds(costs, tier) for tier in ("small", "large")},
        }
    else:
        data["cascade"]["threshold"] = knob
        data["threshold"] = knob if way["threshold"] == "knob" else way["threshold"]
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


def quality(turns: list[Turned]) -> float:
    return float(np.mean([turn.quality for turn in turns]))


def total(turns: list[Turned], costs: CostModel) -> float:
    return sum(turn.money + costs.second_price * turn.seconds for turn in turns)


def cheapest(runs: list[list[Turned]], costs: CostModel, wanted: float) -> int:
    """The place of the run of the lowest total that has the wanted quality, else of the best."""
    good = [place for place, run in enumerate(runs) if quality(run) >= wanted]
    if good:
        return min(good, key=lambda place: total(runs[place], costs))
    return max(range(len(runs)), key=lambda place: quality(runs[place]))


def figures(turns: list[Turned], costs: CostModel) -> dict[str, float]:
    """By turn: money and total in millionths, seconds, quality."""
    n = len(turns)
    return {
        "money": 1e6 * sum(turn.money for turn in turns) / n,
        "seconds": sum(turn.seconds for turn in turns) / n,
        "total": 1e6 * total(turns, costs) / n,
        "quality": quality(turns),
        "large_share": sum(turn.tier == "large" for turn in turns) / n,
        "switches": sum(turn.switched for turn in turns),
        "prefilled": sum(turn.prefilled for turn in turns) / n,
        "mapped": sum(turn.mapped for turn in turns) / n,
    }


def less(turns: list[Turned], ours: list[Turned], costs: CostModel) -> dict[str, Any]:
    """What a turn costs more, and answers better, than `ours`; intervals over sessions."""
    session = np.array([turn.session for turn in turns])

    def paired(value: Any) -> dict[str, float]:
        apart = np.array([value(a) - value(b) for a, b in zip(turns, ours, strict=True)])
        return curves.interval(apart, session, 2000, 0)

    return {
        "more_money": paired(lambda turn: 1e6 * turn.money),
        "more_seconds": paired(lambda turn: turn.seconds),
        "more_total": paired(lambda turn: 1e6 * (turn.money + costs.second_price * turn.seconds)),
        "more_quality": paired(lambda turn: turn.quality),
    }


def markdown(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for setting, one in found.items():
        lines += [
            f"## {setting}",
            "",
            f"{one['turns']} held-out turns in {one['sessions']} sessions, over {one['splits']} "
            "splits of the questions. By turn; money and total (money, and seconds at their "
            "price) in millionths of the currency. `+` columns: less switch economics, with "
            "95 % intervals over sessions.",
            "",
            *table(
                (
                    "policy", "money", "seconds", "total", "quality", "large", "switches",
                    "prefilled", "mapped", "+ total", "+ seconds", "+ quality",
                ),
                [_row(name, way) for name, way in one["ways"].items()],
            ),
            "",
            "What a turn costs more than with switch economics at equal quality, on the same turns:",
            "",
            *table(
                ("other policy", *(f"at {x['level']:.0%} of the gap" for x in one["equal_quality"])),
                [
                    (name, *(_at(x["others"].get(name)) for x in one["equal_quality"]))
                    for name in (SMALL_FIRST, NO_MAP, NO_TERM, LARGE)
                ],
            ),
            "",
        ]  # fmt: skip
    return "\n".join(lines)


def _row(name: str, way: dict[str, Any]) -> tuple[str, ...]:
    return (
        name, f"{way['money']:.0f}", f"{way['seconds']:.2f}", f"{way['total']:.0f}",
        f"{way['quality']:.4f}", f"{way['large_share']:.0%}", str(way["switches"]),
        f"{way['prefilled']:.0f}", f"{way['mapped']:.0f}", interval(way["more_total"], "+.0f"),
        interval(way["more_seconds"], "+.2f"), interval(way["more_quality"]),
    )  # fmt: skip


def _at(one: dict[str, float] | None) -> str | None:
    if one is None:
        return None
    return f"{interval(one, '+.0f')}: {one['other']:.0f} against {one['ours']:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("outcomes", type=Path, help="JSONL as `baton outcomes` writes it")
    parser.add_argument("out", type=Path, help="folder for the report")
    parser.add_argument("--costs", type=Path, default=DEMO, help="cost model of `baton replay`")
    parser.add_argument("--sessions", type=int, default=200, help="held-out sessions of a setting")
    parser.add_argument("--splits", type=int, default=4, help="of the questions")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="repeat; default: all")
    arguments = parser.parse_args()
    items, _ = read_items(arguments.outcomes)
    costs = read_costs(arguments.costs)
    found = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.setting or SETTINGS:
        found[name] = run(
            items, costs, SETTINGS[name], sessions=arguments.sessions, splits=arguments.splits
        )
        (arguments.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "report.md").write_text(markdown(found))
        print(markdown({name: found[name]}), flush=True)


if __name__ == "__main__":
    main()
