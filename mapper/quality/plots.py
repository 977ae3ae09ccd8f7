"""Plots of an evaluation: quality against the native tail, attention by layer, retention by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from mapper.artifact import Artifact


def draw(report: dict[str, Any], artifacts: dict[str, Artifact], out: Path) -> list[Path]:
    """Writes the plots that the report has figures for, as PNG files in `out`."""
    paths = [_tail(report, list(artifacts), out), _layers(artifacts, out)]
    if report.get("tasks"):
        paths.append(_tasks(report["tasks"], list(artifacts), out))
    return paths


def _tail(report: dict[str, Any], names: list[str], out: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in names:
        points = [
            (int(key.split()[1]), one["kl"], *one["kl_interval"])
            for key, one in report["dialogues"][name].items()
            if key.startswith("tail ")
        ]
        tails, kl, low, high = zip(*sorted(points), strict=True)
        axes.plot(tails, kl, marker="o", label=name)
        axes.fill_between(tails, low, high, alpha=0.15)
    axes.set(xlabel="native tail (tokens)", ylabel="KL (nats per token)", yscale="log")
    return _save(figure, axes, out / "kl_by_tail.png")


def _layers(artifacts: dict[str, Artifact], out: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, artifact in artifacts.items():
        axes.plot(artifact.manifest.selection.get("attention_output_cosine", []), label=name)
    axes.set(xlabel="target layer", ylabel="cosine of attention output after W_O, held out")
    return _save(figure, axes, out / "attention_cosine_by_layer.png")


def _tasks(tasks: dict[str, Any], names: list[str], out: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    shown = ["source", *names]
    for offset, name in enumerate(shown):
        places = [index + offset / (len(shown) + 1) for index in range(len(tasks))]
        axes.bar(
            places,
            [one[name]["retention"] or 0 for one in tasks.values()],
            width=1 / (len(shown) + 1),
            label=name,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), list(tasks), rotation=30, ha="right")
    axes.set(ylabel="accuracy over the target's own")
    return _save(figure, axes, out / "retention_by_task.png")


def _save(figure, axes, path: Path) -> Path:
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
