"""`baton eval`: one run that measures artifacts beside floors, controls and the source alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from mapper.artifact import Artifact, write_quality
from mapper.capture.model import CapturedModel
from mapper.quality import controls, plots
from mapper.quality.conversations import read_conversations
from mapper.quality.divergence import Judge
from mapper.quality.scoring import Reader
from mapper.quality.tasks import Task, few_shot, read_tasks

TAILS = (1, 16, 32, 64, 128)
# The native tail is the shortest with at most this KL: every further token is prefilled on the
# user's path, and below it the answers of both caches are hard to tell apart.
KL_GOAL = 0.03

console = Console(stderr=True)


def run(
    source: Path,
    target: Path,
    artifacts: Sequence[Path],
    dialogues: Path,
    out: Path,
    *,
    data: Path | None = None,
    conversations: int = 40,
    items: int = 50,
    tail: int = 64,
    split: str = "heldout",
) -> dict[str, Any]:
    """Measures each artifact and writes `report.json` and plots to the folder `out`.

    Args:
        source, target: the model folders the artifacts were made for.
        artifacts: the first is the one that controls are derived from and that gets the card.
        dialogues: .jsonl of {"messages", "split"}; only `split` is used, chained until prompts
            have 512 tokens.
        data: folder of task files (JSONL); without it only dialogues are measured.
        items: questions of each task.
        tail: native tail of the task questions.

    The first artifact's manifest gets the report as its quality card, and the native tail that
    the measured curve asks for.

    Raises:
        UnsupportedModel: an artifact was made for other models.
        BadArtifact, CalibrationError: an artifact or a file of dialogues cannot be used.
    """
    models = [CapturedModel(folder) for folder in (source, target)]
    loaded = {Path(path).name: Artifact.load(path) for path in artifacts}
    for artifact in loaded.values():
        made_for = artifact.manifest
        artifact.check(
            *(
                model.spec.model_copy(
                    update={"kv_dtype": mine.kv_dtype, "page_size": mine.page_size}
                )
                for model, mine in zip(models, (made_for.source, made_for.target), strict=True)
            )
        )
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    talks = read_conversations(
        dialogues, tokenizer, split=split, shortest_prompt=512, count=conversations
    )
    report: dict[str, Any] = {
        "conversations": len(talks),
        "dialogues": _dialogues(models, loaded, talks),
    }
    if data is not None:
        report["tasks"] = {
            task.name: _task(task, models, tokenizer, loaded, tail)
            for task in read_tasks(data, items=items)
        }
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name, artifact in loaded.items():
        report["dialogues"][name]["parameters"] = artifact.manifest.parameters
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plots.draw(report, loaded, out)
    _print(report, tail)
    first = Path(artifacts[0])
    chosen = choose_tail(report["dialogues"][first.name])
    write_quality(first, report, native_tail=chosen)
    console.print(f"native tail of {first.name}: {chosen} tokens")
    return report


def choose_tail(curve: dict[str, Any]) -> int:
    """The shortest measured tail that reaches `KL_GOAL`, or the longest when none does."""
    good = [tail for tail in TAILS if curve[f"tail {tail}"]["kl"] <= KL_GOAL]
    return min(good, default=max(TAILS))


def _dialogues(models, loaded: dict[str, Artifact], talks) -> dict[str, Any]:
    """Divergence by variant and tail; controls and floors without a tail."""
    judge = Judge(*models, talks)
    first = next(iter(loaded.values()))
    prefixes = {
        "floor: identity": controls.identity,
        "floor: bf16 round trip": controls.rounded,
        "control: raw": controls.raw,
        "control: zero": controls.zero,
        "control: wrong document": controls.wrong_document(first, judge.prefills),
    }
    if first.maps is not None:
        prefixes["control: random map"] = controls.random_map(first)
    results = {}
    for name, artifact in loaded.items():
        measured = judge.measure(controls.mapped(artifact), TAILS)
        results[name] = {f"tail {tail}": one.summary() for tail, one in measured.items()}
        console.print(name, {tail: round(one["kl"], 4) for tail, one in results[name].items()})
    for name, prefix in prefixes.items():
        results[name] = {"tail 1": judge.measure(prefix)[1].summary()}
        console.print(name, round(results[name]["tail 1"]["kl"], 4))
    results["source alone"] = {"tail 1": judge.source_alone().summary()}
    return results


@torch.inference_mode()
def _task(task: Task, models, tokenizer, loaded: dict[str, Artifact], tail: int) -> dict[str, Any]:
    """Accuracy of target, source and each artifact, with paired bootstrap intervals."""
    readers = [Reader(model, tokenizer) for model in models]
    shared_text = few_shot(task, lambda text: len(tokenizer.encode(text)))
    shared = len(tokenizer.encode(shared_text, add_special_tokens=False))
    prefixes = {name: controls.mapped(artifact) for name, artifact in loaded.items()}
    right: dict[str, list[bool]] = {name: [] for name in ("target", "source", *prefixes)}
    lengths = []
    for index, question in enumerate(task.questions):
        ids = torch.tensor(tokenizer.encode(shared_text + question.text, add_special_tokens=False))
        # The last shared token may be merged with the question's first; it is not shared then.
        common = shared - 1
        theirs, own = (reader.prefill(ids, common) for reader in readers)
        lengths.append(len(ids))
        right["target"].append(readers[1].answer(question, ids, (own.k, own.v), 1))
        right["source"].append(readers[0].answer(question, ids, (theirs.k, theirs.v), 1))
        for name, prefix in prefixes.items():
            right[name].append(readers[1].answer(question, ids, prefix(theirs, own, index), tail))
    summary = {"items": len(lengths), "shortest_prompt": min(lengths)}
    native = np.array(right["target"], dtype=float)
    for name, answers in right.items():
        summary[name] = _retention(
            np.array(answers, dtype=float), native, np.array(right["source"], float)
        )
    console.print(task.name, {name: summary[name]["accuracy"] for name in right})
    return summary


def _retention(answers: np.ndarray, native: np.ndarray, source: np.ndarray) -> dict[str, Any]:
    draws = np.random.default_rng(0).integers(0, len(answers), (2000, len(answers)))
    ratio = answers[draws].mean(1) / np.maximum(native[draws].mean(1), 1e-9)
    gap = native.mean() - source.mean()
    return {
        "accuracy": float(answers.mean()),
        "retention": float(answers.mean() / native.mean()) if native.any() else None,
        "retention_interval": [float(value) for value in np.percentile(ratio, [2.5, 97.5])],
        "share_of_gap": float((answers.mean() - source.mean()) / gap) if gap > 0 else None,
    }


def _print(report: dict[str, Any], tail: int) -> None:
    table = Table("dialogues", "parameters", "tail", "KL nats/token", "top-1")
    for name, tails in report["dialogues"].items():
        for length, one in tails.items():
            if isinstance(one, dict):
                low, high = one["kl_interval"]
                cells = f"{one['kl']:.4f} [{low:.4f}, {high:.4f}]", f"{one['top1']:.3f}"
                table.add_row(name, str(tails.get("parameters", "")), length.split()[1], *cells)
    console.print(table)
    for task, summary in report.get("tasks", {}).items():
        table = Table(
            f"{task} (tail {tail}, {summary['items']} items)",
            "accuracy",
            "retention",
            "95 %",
            "gap",
        )
        for name, one in summary.items():
            if isinstance(one, dict):
                table.add_row(
                    name,
                    f"{one['accuracy']:.3f}",
                    "-" if one["retention"] is None else f"{one['retention']:.3f}",
                    "{:.2f}..{:.2f}".format(*one["retention_interval"]),
                    "-" if one["share_of_gap"] is None else f"{one['share_of_gap']:.2f}",
                )
        console.print(table)
