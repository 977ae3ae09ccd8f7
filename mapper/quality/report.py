"""What a run prints: its estimate, its progress, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mapper.quality.schedule import Part

console = Console(stderr=True)


def announce(parts: Sequence[Part], minutes: float) -> None:
    """How much will be measured, and how long that takes, before it is begun."""
    table = Table("part", "there", "measured", "s each", "minutes")
    for part in parts:
        cells = str(part.items), str(part.fitting), f"{part.seconds:.1f}", f"{part.total / 60:.1f}"
        table.add_row(part.name, *cells)
    total = sum(part.total for part in parts) / 60
    bound = f"the limit is {minutes:g}" if minutes else "no limit"
    console.print(table)
    console.print(f"about {total:.0f} minutes ({bound})")


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def show(report: dict[str, Any]) -> None:
    _dialogues(report)
    _ratios(report)
    for name, task in report["tasks"].items():
        _task(name, task, report["settings"]["tail"])
    _claims(report)
    _harness(report["harness"])
    for name, reason in report["left_out"].items():
        console.print(f"left out: {name}: {reason}")


def _dialogues(report: dict[str, Any]) -> None:
    table = Table("dialogues", "parameters", "tail", "KL nats/token", "95 %", "top-1", "answers")
    for name, tails in report["dialogues"].items():
        parameters = report["variants"].get(name, {}).get("parameters")
        for length, one in tails.items():
            table.add_row(
                name,
                "" if parameters is None else f"{parameters:,}",
                length.split()[1],
                f"{one['kl']:.4f}",
                _interval(one["kl_interval"], 4),
                f"{one['top1']:.3f}",
                str(one["conversations"]),
            )
    console.print(table)


def _ratios(report: dict[str, Any]) -> None:
    table = Table("KL", "of", "ratio", "95 %")
    for label, ratios in report["ratios"].items():
        for name, one in ratios.items():
            table.add_row(label, name, _number(one["value"], 2), _interval(one["interval"], 2))
    console.print(table)


def _task(name: str, task: dict[str, Any], tail: int) -> None:
    title = f"{name} ({task['class']}, {task['items']} items, tail {tail})"
    table = Table(title, "items", "score", "retention", "95 %", "floor-normalised", "gap", "same")
    for arm, one in task["arms"].items():
        if not one["items"]:
            continue
        table.add_row(
            arm,
            str(one["items"]),
            _number(one["score"]["value"]),
            _number(one["retention"]["value"]),
            _interval(one["retention"]["interval"], 2),
            _number((one["floor_normalised"] or {}).get("value")),
            _number((one["share_of_gap"] or {}).get("value")),
            _number(one.get("same_as_native"), 2),
        )
    console.print(table)
    arm = next(iter(task["arms"].values()), {})
    if "cut" in arm:
        ended = {name: (one["cut"], one["looping"]) for name, one in task["arms"].items()}
        console.print(f"answers cut by the limit, and looping: {ended}")


def _claims(report: dict[str, Any]) -> None:
    table = Table("variant", "class", "retention", "95 %", "goal", "met", "basis")
    for name, claims in report["claims"].items():
        for kind, one in claims.items():
            goal = one["goal"]
            if isinstance(goal, dict):
                goal = f"KL {goal['kl']}, top-1 {goal['top1']}"
            table.add_row(
                name,
                kind,
                _number(one["retention"]),
                _interval(one["interval"], 3),
                "-" if goal is None else str(goal),
                {None: "-", True: "yes", False: "no"}[one["met"]],
                one["basis"],
            )
    console.print(table)


def _harness(results: dict[str, Any]) -> None:
    if not results:
        return
    table = Table("lm-evaluation-harness", "task", "figures")
    for name, tasks in results.items():
        for task, figures in tasks.items():
            shown = ", ".join(f"{key} {value:.4f}" for key, value in figures.items())
            table.add_row(name, task, shown)
    console.print(table)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(interval: Sequence[float] | None, digits: int) -> str:
    return "-" if interval is None else "{:.{d}f}..{:.{d}f}".format(*interval, d=digits)
