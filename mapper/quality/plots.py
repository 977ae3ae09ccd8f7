"""Plots of a report: by native tail, by source layers read, by layer, and retention by task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Report = dict[str, Any]


def draw(report: Report, out: Path) -> list[Path]:
    """Writes the plots that the report has figures for, as PNG files in `out`."""
    plots: dict[str, Callable] = {
        "kl_by_tail.png": _tail,
        "kl_by_k.png": _k,
        "layers.png": _layers,
        "retention_by_task.png": _tasks,
    }
    return [
        path
        for name, plot in plots.items()
        if (path := _save(plot(report), out / name)) is not None
    ]


def _tail(report: Report):
    """KL against the native tail: the first variant's curve, the others' two points."""
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in report["variants"]:
        points = [
            (int(key.split()[1]), one["kl"], *(one["kl_interval"] or (one["kl"], one["kl"])))
            for key, one in report["dialogues"][name].items()
        ]
        tails, kl, low, high = zip(*sorted(points), strict=True)
        axes.plot(tails, kl, marker="o", label=name)
        axes.fill_between(tails, low, high, alpha=0.15)
    axes.set(xlabel="native tail (tokens)", ylabel="KL (nats per token)", yscale="log")
    return figure


def _k(report: Report):
    """KL without a tail against the mean number of source layers that a map reads."""
    known = {name: one for name, one in report["variants"].items() if one["k"]}
    if not known:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, one in known.items():
        kl = report["dialogues"][name]["tail 1"]["kl"]
        label = f"{name}: {one['parameters'] / 1e6:.1f} M parameters"
        axes.scatter([one["k"]], [kl], s=40, label=label)
    axes.set(
        xlabel="source layers read by a map (mean)",
        ylabel="KL without a native tail (nats per token)",
        yscale="log",
    )
    return figure


def _layers(report: Report):
    figure, places = pyplot.subplots(1, 3, figsize=(13, 4))
    titles = {
        "r2_k": "R2 of keys (un-rotated)",
        "r2_v": "R2 of values",
        "attention_cosine": "cosine of attention output after W_O",
    }
    for axes, (figures, title) in zip(places, titles.items(), strict=True):
        for name, one in report["layers"].items():
            axes.plot(one[figures], label=name)
        axes.set(xlabel="target layer", title=title)
    return figure


def _tasks(report: Report):
    tasks = {
        name: task
        for name, task in report["tasks"].items()
        if task["arms"] and task["arms"]["native"]["items"]
    }
    if not tasks:
        return None
    shown = ["source alone", *report["variants"]]
    figure, axes = pyplot.subplots(figsize=(max(7, 0.9 * len(tasks)), 4))
    for offset, arm in enumerate(shown):
        for index, task in enumerate(tasks.values()):
            retention = task["arms"][arm]["retention"]
            value, interval = retention["value"] or 0, retention["interval"]
            errors = None
            if interval:
                errors = [[max(0, value - interval[0])], [max(0, interval[1] - value)]]
            axes.bar(
                index + offset / (len(shown) + 1),
                value,
                yerr=errors,
                error_kw={"linewidth": 0.7},
                width=1 / (len(shown) + 1),
                color=f"C{offset}",
                label=arm if index == 0 else None,
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), list(tasks), rotation=30, ha="right")
    axes.set(ylabel="score over the target's own", ylim=(0, 1.3))
    return figure


def _save(figure, path: Path) -> Path | None:
    if figure is None:
        return None
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
