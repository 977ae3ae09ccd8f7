"""`baton eval`: one run that measures artifacts beside floors, controls and the source alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mapper.artifact import read_manifest, write_quality
from mapper.quality import card, plots, report
from mapper.quality.evaluation import Evaluation
from mapper.quality.settings import Settings
from mapper.quality.tasks import read_tasks


def run(
    source: Path,
    target: Path,
    artifacts: Sequence[Path],
    dialogues: Path,
    out: Path,
    *,
    data: Path | None = None,
    baseline: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measures artifacts side by side; writes `report.json` and plots to the folder `out`.

    `report.json` is written after each part: a run that is ended leaves what it had.

    Args:
        source, target: the model folders the artifacts were made for.
        artifacts: the first is the one that controls are derived from.
        dialogues: .jsonl of {"messages", "split"}; only one split is used, chained until prompts
            have 512 tokens.
        data: folder of task files (JSONL); without it only dialogues are measured.
        baseline: an artifact that all others are compared with; measured as published, too.
        settings: fields of `Settings`.

    Manifests of artifacts that run with the native tail that was measured get their part of the report as quality card;
    classes that an earlier run measured and this one did not stay in it (`card.merged`).

    Raises:
        UnsupportedModel: an artifact was made for other models.
        BadArtifact, BadTask, CalibrationError: an artifact, a task file or a file of dialogues
            cannot be used.
    """
    started = time.monotonic()
    chosen = Settings(**settings)
    # Task files first: a malformed line is found before any model is loaded.
    tasks = [] if data is None else list(
        read_tasks(data, items=chosen.items, only=list(chosen.tasks) or None)
    )  # fmt: skip
    evaluation = Evaluation(source, target, artifacts, baseline, dialogues, tasks, chosen)
    out = Path(out)

    def save(results: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        results["seconds"] = round(time.monotonic() - started, 1)
        (out / "report.json").write_text(json.dumps(results, indent=1) + "\n")

    results = evaluation.run(started, save)
    save(results)
    plots.draw(results, out)
    for name, folder in evaluation.folders.items():
        _write_card(folder, quality_card(results, name))
    if chosen.harness:
        results["harness"] = evaluation.harness()
        save(results)
    report.show(results)
    report.console.print(f"{out}/report.json and plots, after {results['seconds']:.0f} s")
    return results


def _write_card(folder: Path, new: dict[str, Any]) -> None:
    manifest, measured = read_manifest(folder), new["settings"]["tail"]
    if max(manifest.native_tail, 1) != measured:
        report.console.print(
            f"[yellow]{folder.name} runs with a native tail of {manifest.native_tail} tokens, this run measured "
            f"{measured}: its quality card stays as it was[/]"
        )
        return
    write_quality(folder, card.merged(manifest.quality, new))


def quality_card(results: dict[str, Any], name: str) -> dict[str, Any]:
    """One artifact's part of a report, with floors, controls and the source alone."""
    variants = results["variants"]
    beside = [arm for arm in results["dialogues"] if arm == name or arm not in variants]
    return {
        "settings": results["settings"],
        "conversations": results["conversations"],
        "retention": results["policy_retention"][name],
        "claims": results["claims"][name],
        "dialogues": {arm: results["dialogues"][arm] for arm in beside},
        "classes": {
            kind: figures | {"retention": {arm: one for arm, one in figures["retention"].items() if arm in beside}}
            for kind, figures in results["classes"].items()
        },
        "tasks": {
            task: {key: figures[key] for key in ("class", "items")}
            | {"arms": {arm: one for arm, one in figures["arms"].items() if arm in (*beside, card.NATIVE)}}
            for task, figures in results["tasks"].items()
        },
        "layers": results["layers"][name],
    }  # fmt: skip
