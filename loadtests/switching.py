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

from loadtests.equal_quality import Tried, compare_at, levels
from loadtests.sessions import SETTINGS, Setting, mixed_sessions
from loadtests.ways import (
    LARGE,
    NO_MAP,
    NO_TERM,
    PINNED,
    SMALL,
    SMALL_FIRST,
    WAYS,
    WITH_TERM,
    policy,
    settings,
)
from policies import Turn
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

# Shares of the way from always small's to always large's quality.
LEVELS = (0.5, 0.8, 1.0)


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
