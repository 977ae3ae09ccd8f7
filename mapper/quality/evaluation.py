"""The models, artifacts, arms and questions of one run, and its order of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mapper.artifact import Artifact
from mapper.capture.model import CapturedModel
from mapper.errors import BadTask, UnsupportedModel
from mapper.quality import arms, card, harness, report, reuse
from mapper.quality.comparators import published_arm
from mapper.quality.conversations import read_conversations, read_other
from mapper.quality.divergence import Divergences, measure
from mapper.quality.layers import by_layer
from mapper.quality.questions import (
    LONGEST_PROMPT,
    SHORTEST_PROMPT,
    Prompt,
    TaskResult,
    ask,
    capacity,
    prompts,
)
from mapper.quality.reader import Reader
from mapper.quality.schedule import Part, extras, plan, stopwatch
from mapper.quality.settings import DTYPES, TAILS, Settings
from mapper.quality.tasks import Task

LAYER_TALKS = 6
# Longer contexts of the harness lose their beginning.
HARNESS_CAPACITY = 2048


class Evaluation:
    """The models, artifacts, arms and questions of one run."""

    def __init__(
        self,
        source: Path,
        target: Path,
        artifacts: Sequence[Path],
        baseline: Path | None,
        dialogues: Path,
        tasks: list[Task],
        settings: Settings,
    ) -> None:
        self.folders = _named(artifacts, baseline)
        self.baseline = None if baseline is None else _name_of(self.folders, baseline)
        self.artifacts = {name: Artifact.load(folder) for name, folder in self.folders.items()}
        own = next(iter(self.artifacts.values())).manifest.native_tail
        self.settings = replace(settings, tail=max(own, 1)) if settings.tail is None else settings
        # What the harness lacks is found before anything is measured.
        self._harness_tasks = harness.manager(settings.harness, settings.harness_tasks)
        self.models = [CapturedModel(folder) for folder in (source, target)]
        for artifact in self.artifacts.values():
            _check(artifact, self.models)
        for model in self.models:
            model.model.to(DTYPES[settings.dtype])
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            target, local_files_only=True
        )
        read = {"split": settings.split, "shortest_prompt": SHORTEST_PROMPT}
        self.talks = read_conversations(
            dialogues, self.tokenizer, count=settings.conversations, **read
        )
        other = read_other(dialogues, self.tokenizer, **read)
        self.tasks = [(task, *prompts(task, self.tokenizer)) for task in tasks]
        self.left_out = {
            task.name: f"no prompt of at most {LONGEST_PROMPT} tokens; {too_long} are longer"
            for task, made, too_long in self.tasks
            if not made
        }
        self.reader = self._reader(other)

    def _reader(self, other: torch.Tensor) -> Reader:
        """The arms, in the order that measuring needs: those judged everywhere come first."""
        first = next(iter(self.artifacts.values()))
        variants = [arms.variant(name, one) for name, one in self.artifacts.items()]
        self.variants = len(variants)
        rows = [arms.native(), *variants, *arms.floors(), *arms.controls(first)]
        longest = max(len(talk.ids) for talk in self.talks)
        for task, made, _ in self.tasks:
            if made:
                longest = max(longest, capacity(made, task.format.answer_tokens))
        theirs = self.models[0].prefill(other)
        self.foreign = foreign = (theirs.k.float(), theirs.v.float())
        try:
            group = self._reuse_group(longest, foreign)
            rows.append(reuse.recomputing(*self.models, group))
        except UnsupportedModel as error:
            self.left_out[reuse.NAME] = str(error)
        if self.baseline is not None:
            folder = self.folders[self.baseline]
            rows.append(published_arm(folder, self.artifacts[self.baseline]))
        return Reader(*self.models, rows, longest, foreign)

    def _reuse_group(self, longest: int, foreign: arms.KV) -> range:
        reuse.require_same_architecture(*self.models)

        def divergence(arm: arms.Arm) -> float:
            reader = Reader(*self.models, [arms.native(), arm], longest, foreign)
            found = measure(reader, self.talks[:2], tail=1, curve=(), variants=0, extras=2)
            return found[arm.name][1].summary()["kl"]

        return reuse.best_group(*self.models, divergence)

    def run(self, started: float, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Measures everything; `save` gets the report so far after each part."""
        minutes = self.settings.minutes
        asked = [(task, made) for task, made, _ in self._asked()]
        parts = plan(self.reader, self.talks, asked, self.settings, self.variants)
        end = started + 60 * minutes if minutes else float("inf")
        talks, *asked = parts
        report.announce(parts, minutes)
        with report.progress() as bar:
            step = bar.add_task("dialogues", total=None)
            divergences = self._dialogues(talks, end)
            bar.update(step, total=1, completed=1)
            layers = by_layer(
                self.reader,
                self.talks[: min(LAYER_TALKS, talks.fitting)],
                range(1, 1 + self.variants),
            )
            results: list[TaskResult] = []
            save(self._summary(divergences, layers, results))
            for part, (task, made, too_long) in zip(asked, self._asked(), strict=True):
                step = bar.add_task(task.name, total=part.fitting)
                result = self._ask(part, task, made, end, lambda at=step: bar.advance(at))
                result.too_long = too_long
                results.append(result)
                save(self._summary(divergences, layers, results))
        return self._summary(divergences, layers, results)

    def harness(self) -> dict[str, Any]:
        """Outside of the time limit: how long the harness takes is its tasks' affair."""
        settings, reader = self.settings, self.reader
        if self._harness_tasks is None:
            return {}
        models = {}
        for arm in reader.arms[: 1 + self.variants]:
            own = Reader(*self.models, [arm], HARNESS_CAPACITY, self.foreign)
            models[arm.name] = harness.Prompted(own, self.tokenizer, settings.tail)
            if arm.role == "native":
                models["source alone"] = harness.Prompted(
                    own, self.tokenizer, settings.tail, source=True
                )
        return harness.evaluate(models, settings.harness, self._harness_tasks, settings.items)

    def _asked(self) -> list[tuple[Task, list[Prompt], int]]:
        return [one for one in self.tasks if one[1]]

    def _dialogues(self, part: Part, end: float) -> Divergences:
        return measure(
            self.reader,
            self.talks[: part.fitting],
            tail=self.settings.tail,
            curve=TAILS,
            variants=self.variants,
            extras=extras(part.fitting),
            running=stopwatch(part, end),
        )

    def _ask(self, part: Part, task: Task, made: list[Prompt], end: float, step) -> TaskResult:
        return ask(
            task,
            made[: part.fitting],
            self.reader,
            self.tokenizer,
            tail=self.settings.tail,
            main=1 + self.variants,
            extras=extras(part.fitting),
            running=stopwatch(part, end),
            step=step,
        )

    def _summary(self, divergences: Divergences, layers, results) -> dict[str, Any]:
        names = list(self.artifacts)
        dialogues = {
            arm: {f"tail {length}": one.summary() for length, one in lengths.items()}
            for arm, lengths in divergences.items()
        }
        judged = [arm.name for arm in self.reader.arms] + ["source alone"]
        by_class = card.classes(results, judged)
        made = {
            name: card.claims(name, self.settings.tail, divergences, by_class) for name in names
        }
        return {
            "harness": {},
            "direction": [model.spec.name for model in self.models],
            "settings": self.settings.record(),
            "variants": {
                name: {
                    "method": one.manifest.method,
                    "parameters": one.manifest.parameters,
                    "k": _mean_k(one),
                }
                for name, one in self.artifacts.items()
            },
            "baseline": self.baseline,
            "left_out": self.left_out,
            "conversations": len(divergences["source alone"][1].tokens),
            "dialogues": dialogues,
            "ratios": card.ratios(divergences, names, self.baseline, self.settings.tail),
            "layers": layers,
            "tasks": {one.task.name: card.task_figures(one) for one in results},
            "classes": by_class,
            "claims": made,
            "policy_retention": {name: card.policy_retention(made[name]) for name in names},
        }


def _named(artifacts: Sequence[Path], baseline: Path | None) -> dict[str, Path]:
    """Artifact folders by a name that is unique: the folder's, with its parents' where needed."""
    folders = list(dict.fromkeys(Path(path).resolve() for path in (*artifacts, baseline) if path))
    if not folders:
        raise BadTask("name at least one artifact to measure")
    return {_shortest_name(folder, folders): folder for folder in folders}


def _shortest_name(folder: Path, folders: Sequence[Path]) -> str:
    ends = (folder.parts[-size:] for size in range(1, len(folder.parts) + 1))
    alone = (end for end in ends if sum(one.parts[-len(end) :] == end for one in folders) == 1)
    return str(Path(*next(alone)))


def _name_of(folders: dict[str, Path], wanted: Path) -> str:
    return next(name for name, folder in folders.items() if folder == Path(wanted).resolve())


def _check(artifact: Artifact, models: Sequence[CapturedModel]) -> None:
    """Refuses an artifact of other models; KV dtype and page size are the worker's, not theirs."""
    made_for = artifact.manifest
    artifact.check(
        *(
            model.spec.model_copy(update={"kv_dtype": mine.kv_dtype, "page_size": mine.page_size})
            for model, mine in zip(models, (made_for.source, made_for.target), strict=True)
        )
    )


def _mean_k(artifact: Artifact) -> float | None:
    """Source layers that a target head's keys or values are made of, on average."""
    layers = artifact.manifest.source.layers
    counts = [
        len({layer % layers for layer, _ in head})
        for plan in (*artifact.manifest.k, *artifact.manifest.v)
        for head in plan.blocks or [[(layer, 0) for layer in plan.layers]]
    ]
    return sum(counts) / len(counts) if counts else None
