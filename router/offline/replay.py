"""`baton replay`: what recorded sessions would have cost, and been worth, under each policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import policies
from router.offline import curves
from router.offline.costmodel import CostModel, read_costs
from router.offline.sessions import read_sessions
from router.offline.simulate import Turned, simulate


def replay(log: Path, files: list[Path], costs: Path, out: Path | None = None) -> dict[str, Any]:
    """Figures of each policy; to `out` as JSON with every turn. Raises RecordError, PolicyError."""
    sessions, skipped = read_sessions(log)
    model = read_costs(costs)
    loaded = {name: policies.from_file(file) for name, file in _names(files).items()}
    runs = {name: simulate(sessions, policy, model) for name, policy in loaded.items()}
    found = {
        "log": log.name,
        "costs": costs.name,
        "sessions": len(sessions),
        "turns": sum(map(len, sessions.values())),
        "skipped_lines": skipped,
        "policies": summarise(runs, model),
        "versions": {name: policy.version for name, policy in loaded.items()},
    }
    if out is not None:
        turns = {name: [vars(turn) for turn in run] for name, run in runs.items()}
        out.write_text(json.dumps({**found, "by_turn": turns}, indent=1) + "\n")
    return found


def summarise(runs: dict[str, list[Turned]], costs: CostModel) -> dict[str, dict[str, Any]]:
    """By policy. `less_first` compares with the first policy, paired by turn, with an interval
    over sessions: of the total cost per turn and of quality."""
    first = next(iter(runs.values()))
    return {
        name: {**_figures(run, costs), "less_first": _compare(run, first, costs)}
        for name, run in runs.items()
    }


def _figures(run: list[Turned], costs: CostModel) -> dict[str, Any]:
    money, seconds = sum(t.money for t in run), sum(t.seconds for t in run)
    judged = [t.quality for t in run if t.quality is not None]
    return {
        "money": money,
        "seconds": seconds,
        "total": money + costs.second_price * seconds,
        "quality": float(np.mean(judged)) if judged else None,
        "first_token_seconds": float(np.mean([t.first_token_seconds for t in run])),
        "large_share": float(np.mean([t.tier == "large" for t in run])),
        "switches": sum(t.switched for t in run),
        "escalated": sum(t.escalated for t in run),
        "refused": sum(t.refused for t in run),
        "prefilled_tokens": sum(t.prefilled for t in run),
        "mapped_tokens": sum(t.mapped for t in run),
    }


def _compare(run: list[Turned], first: list[Turned], costs: CostModel) -> dict[str, Any]:
    session = np.array([t.session for t in run])

    def paired(value: Any) -> dict[str, float] | None:
        pairs = [(value(a), value(b)) for a, b in zip(run, first, strict=True)]
        if any(None in pair for pair in pairs):
            return None
        return curves.interval(np.array([a - b for a, b in pairs]), session, 2000, 0)

    return {
        "total": paired(lambda t: t.money + costs.second_price * t.seconds),
        "quality": paired(lambda t: t.quality),
    }


def table(found: dict[str, Any]) -> Table:
    columns = ("policy", "money", "seconds", "total", "quality", "large", "switches", "escalated",
               "prefilled", "mapped")  # fmt: skip
    shown = Table(*columns, title=f"{found['sessions']} sessions, {found['turns']} turns")
    for name, one in found["policies"].items():
        quality = "-" if one["quality"] is None else f"{one['quality']:.4f}"
        shown.add_row(
            name, f"{one['money']:.4f}", f"{one['seconds']:.0f}", f"{one['total']:.4f}", quality,
            f"{one['large_share']:.1%}", str(one["switches"]), str(one["escalated"]),
            f"{one['prefilled_tokens']:.0f}", f"{one['mapped_tokens']:.0f}",
        )  # fmt: skip
    return shown


def _names(files: list[Path]) -> dict[str, Path]:
    """Stems, or whole paths where two have the same."""
    stems = [file.stem for file in files]
    return {file.stem if stems.count(file.stem) == 1 else str(file): file for file in files}
