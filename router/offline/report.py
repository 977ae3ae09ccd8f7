"""What `baton tune` found, as Markdown and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.offline.curves import Curve

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
        "| score | AUC | gap recovered | above shuffled | at 30 % large | within tasks, at 30 % "
        "| cost of 50 / 80 / 95 % of large's quality | of 50 / 80 / 95 % of the gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found["scores"].items():
        against = one["against_shuffled"]
        lines.append(
            f"| {name} | {_number(one['auc'])} | {_number(one['gap_recovered'])} "
            f"| {_interval(against['area'])} | {_interval(against['30%'])} "
            f"| {_interval(one['against_shuffled_within_task']['30%'])} "
            f"| {_levels(one['of_large_quality'])} | {_levels(one['of_gap'])} |"
        )
    for name in ("oracle", "shuffled"):
        one = found[name]
        lines.append(
            f"| {name} | | {_number(one['gap_recovered'])} | | | "
            f"| {_levels(one['of_large_quality'])} | {_levels(one['of_gap'])} |"
        )
    lines += ["", f"Thresholds for {found['goal']}, on the held-out turns:", ""]
    lines += ["| score | threshold | large turns | quality | loss per session |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for name, one in found["scores"].items():
        if at := one.get("at_threshold"):
            lines.append(
                f"| {name} | {at['threshold']:.4g} | {at['large_share']:.1%} "
                f"| {at['quality']:.3f} | {at['session_loss']:.3f} |"
            )
        else:
            lines.append(f"| {name} | cannot be had | | | |")
    if assumption := found.get("assumption"):
        lines += ["", assumption]
    lines += ["", "| task | turns | small | large |", "| --- | --- | --- | --- |"]
    for task, one in found["by_task"].items():
        lines.append(f"| {task} | {one['turns']} | {one['small']:.3f} | {one['large']:.3f} |")
    lines += ["", "Predicted and real gain of the large model, in fifths of the held-out turns:"]
    lines += ["", "| score | predicted -> real |", "| --- | --- |"]
    for name, one in found["scores"].items():
        if groups := one.get("calibration"):
            pairs = ", ".join(f"{g['predicted']:+.3f} -> {g['real']:+.3f}" for g in groups)
            lines.append(f"| {name} | {pairs} |")
    return "\n".join([*lines, "", "![curves](curves.png)", ""])


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


def _interval(one: dict[str, float]) -> str:
    return f"{one['difference']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _levels(levels: dict[str, float | None]) -> str:
    return " / ".join("-" if value is None else f"{value:.2f}" for value in levels.values())
