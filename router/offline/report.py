"""What `baton tune` found, as Markdown and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.offline.curves import Curve
from router.offline.tables import interval, table

# Drawn boldly; the other scores are thin.
_MAIN = ("classifier", "cascade")


def markdown(found: dict[str, Any]) -> str:
    quality, turns = found["quality"], found["turns"]
    lines = [
        f"# Routing of {found['source']}",
        "",
        f"Held out: {turns['test']} turns ({turns['train']} trained the scores, "
        f"{turns['calibrate']} set the thresholds). Quality of the small model "
        f"{quality['small']:.3f}, of the large one {quality['large']:.3f} (difference "
        f"{quality['gap_difference']:+.3f}, 95 % interval {quality['gap_low']:+.3f} to "
        f"{quality['gap_high']:+.3f}); large better on {quality['large_better']:.1%} of turns, "
        f"small better on {quality['small_better']:.1%}.",
        "",
        "`gap recovered` is the area under the curve: 0 is always small, 0.5 what a shuffled "
        "score reaches. `above shuffled` is the area above that of the shuffled control on the "
        "same turns, with its paired bootstrap interval over sessions. `AUC` is how well the "
        "score finds the turns on which the large model is better. Costs are in always-large; "
        f"a small turn is {found['small_cost']:g} and a cascade pays for it on every turn.",
        "",
        *table(
            (
                "score", "AUC", "gap recovered", "above shuffled", "at 30 % large",
                "within tasks, at 30 %", "cost of 50 / 80 / 95 % of large's quality",
                "of 50 / 80 / 95 % of the gap",
            ),
            [*_scores(found), *(_control(name, found[name]) for name in ("oracle", "shuffled"))],
        ),
        "",
        f"Thresholds for {found['goal']}, on the held-out turns:",
        "",
        *table(
            ("score", "threshold", "large turns", "quality", "loss per session"),
            [_at_threshold(name, one) for name, one in found["scores"].items()],
        ),
    ]  # fmt: skip
    if assumption := found.get("assumption"):
        lines += ["", assumption]
    tasks = found["by_task"].items()
    lines += ["", *table(("task", "turns", "small", "large"), [
        (task, one["turns"], f"{one['small']:.3f}", f"{one['large']:.3f}") for task, one in tasks
    ])]  # fmt: skip
    lines += ["", "Predicted and real gain of the large model, in fifths of the held-out turns:"]
    calibrated = [
        (name, ", ".join(f"{g['predicted']:+.3f} -> {g['real']:+.3f}" for g in groups))
        for name, one in found["scores"].items()
        if (groups := one.get("calibration"))
    ]
    lines += ["", *table(("score", "predicted -> real"), calibrated)]
    return "\n".join([*lines, "", "![curves](curves.png)", ""])


def _scores(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            _number(one["auc"]),
            _number(one["gap_recovered"]),
            interval(one["against_shuffled"]["area"]),
            interval(one["against_shuffled"]["30%"]),
            interval(one["against_shuffled_within_task"]["30%"]),
            _levels(one["of_large_quality"]),
            _levels(one["of_gap"]),
        )
        for name, one in found["scores"].items()
    ]


def _control(name: str, one: dict[str, Any]) -> tuple[str | None, ...]:
    levels = _levels(one["of_large_quality"]), _levels(one["of_gap"])
    return (name, None, _number(one["gap_recovered"]), None, None, None, *levels)


def _at_threshold(name: str, one: dict[str, Any]) -> tuple[str | None, ...]:
    at = one.get("at_threshold")
    if at is None:
        return (name, "cannot be had", None, None, None)
    figures = f"{at['large_share']:.1%}", f"{at['quality']:.3f}", f"{at['session_loss']:.3f}"
    return (name, f"{at['threshold']:.4g}", *figures)


def plot(lines: dict[str, Curve], path: Path) -> None:
    """Quality by cost."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name, line in lines.items():
        if name in ("oracle", "shuffled"):
            axes.plot(line.cost, line.quality, "--", color="grey", lw=0.9)
            axes.annotate(name, (line.cost[len(line.cost) // 2], line.at(0.5)), color="grey")
        else:
            axes.plot(line.cost, line.quality, label=name, lw=2 if name in _MAIN else 0.9)
    axes.set(xlabel="cost of a turn (always large: 1)", ylabel="quality")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _levels(levels: dict[str, float | None]) -> str:
    return " / ".join("-" if value is None else f"{value:.2f}" for value in levels.values())
