"""A task's questions put to every arm and to the source alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from mapper.quality.arms import Arm
from mapper.quality.batch import CacheBatch
from mapper.quality.reader import Reader
from mapper.quality.scoring import Continuation, Likelihood, score, speak
from mapper.quality.statistics import Scores
from mapper.quality.tasks import Question, Task
from mapper.quality.tasks.answers import exact, overlap, same_number

# Shorter prompts are reported apart: with a native tail of 64 tokens, at most an eighth of a
# longer one is the target's own.
SHORTEST_PROMPT = 512
# Longer prompts are left out and counted.
LONGEST_PROMPT = 1536
SOURCE = "source alone"

_JUDGES = {"answer": exact, "overlap": overlap}


@dataclass(frozen=True)
class Prompt:
    """A question as token ids, with what may follow it."""

    question: Question
    ids: torch.Tensor
    continuations: list[Continuation]


@dataclass
class TaskResult:
    """Scores of the long prompts, `short` those of prompts under SHORTEST_PROMPT.

    `likelihood`: of the worked solutions, for tasks that are also judged by what is generated.
    `same`: whether an arm answered as the native one did. `kinds`: of each long prompt.
    `cut`, `looping`: generated answers by arm.
    """

    task: Task
    scores: Scores
    short: Scores
    likelihood: Scores = field(default_factory=lambda: Scores(log=True))
    same: Scores = field(default_factory=Scores)
    kinds: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    looping: dict[str, int] = field(default_factory=dict)
    too_long: int = 0


def prompts(task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], int]:
    """The questions as token ids, and how many were left out as too long."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    shared = task.shared_prompt(lambda text: len(encode(text)), SHORTEST_PROMPT)
    made, too_long = [], 0
    for question in task.questions:
        ids = torch.tensor(tokenizer.encode(shared + question.prompt))
        if len(ids) > LONGEST_PROMPT:
            too_long += 1
            continue
        continuations = []
        for option in question.options or ((question.reference,) if question.reference else ()):
            head, suffix = encode(option), encode(question.suffix)
            unscored = len(head) if suffix else 0
            continuations.append(Continuation(torch.tensor(head + suffix), unscored))
        made.append(Prompt(question, ids, continuations))
    return made, too_long


def ask(
    task: Task,
    made: Sequence[Prompt],
    reader: Reader,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tail: int,
    main: int,
    extras: int,
    running: Callable[[], bool] = lambda: True,
    step: Callable[[], None] = lambda: None,
) -> TaskResult:
    """Puts every prompt to the first `main` arms, and the first `extras` prompts to all arms.

    Args:
        tail: last tokens of a prompt that the target computes itself on top of an arm's cache;
            1 for arms that are judged without.
        running: asked before each prompt; False ends the task.
    """
    log = task.format.judge == "likelihood"
    chance = _chance(made) if task.format.judge == "choice" else None
    result = TaskResult(task, Scores(log, chance), Scores(log, chance))
    with_tail = sum(arm.tail for arm in reader.arms)
    for index, prompt in enumerate(made):
        if index and not running():
            break
        active = main if index >= extras else len(reader.arms)
        size = len(prompt.ids)
        start = max(size - tail, 1)
        reader.load(prompt.ids[: start if active <= with_tail else size - 1], active)
        answers: dict[str, _Answer] = {}
        if active > with_tail:
            rows = slice(with_tail, active)
            found = _answers(task, prompt, tokenizer, reader.batch, size - 1, rows)
            answers |= _named(reader.arms[rows], found)
        rows = slice(0, min(active, with_tail))
        found = _answers(task, prompt, tokenizer, reader.batch, start, rows)
        answers |= _named(reader.arms[rows], found)
        answers[SOURCE] = _answers(task, prompt, tokenizer, reader.source, start, slice(None))[0]
        reader.keep(start)
        _record(result, prompt, answers)
        step()
    return result


@dataclass(frozen=True)
class _Answer:
    """One arm's answer: its score and weight, what it said or chose, and how it ended."""

    score: float
    weight: float
    said: str | int
    likelihood: Likelihood | None = None
    cut: bool = False
    looping: bool = False


def _answers(
    task: Task,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    batch: CacheBatch,
    start: int,
    rows: slice,
) -> list[_Answer]:
    kind, question = task.format, prompt.question
    tail = prompt.ids[start:]
    likelihoods: list[list[Likelihood]] = []
    if prompt.continuations:
        likelihoods = score(batch, tail, start, prompt.continuations, rows)
    if kind.generates:
        spoken = speak(
            batch, tokenizer, tail, start,
            limit=kind.answer_tokens, stops=kind.stops, rows=rows,
        )  # fmt: skip
        return [
            _Answer(
                _judge(task, one.text, question),
                1.0,
                one.text,
                likelihoods[row][0] if likelihoods else None,
                one.cut,
                one.looping,
            )
            for row, one in enumerate(spoken)
        ]
    return [_scored(task, question, row) for row in likelihoods]


def _judge(task: Task, text: str, question: Question) -> float:
    if task.format.judge == "number":
        return same_number(text, question.answers[0])
    return _JUDGES[task.format.judge](text, question.answers)


def _scored(task: Task, question: Question, found: list[Likelihood]) -> _Answer:
    if task.format.judge == "choice":
        values = [one.logprob for one in found]
        if task.format.per_character:
            values = [
                value / len(option) for value, option in zip(values, question.options, strict=True)
            ]
        chosen = max(range(len(values)), key=values.__getitem__)
        return _Answer(float(chosen == question.label), 1.0, chosen)
    if task.format.judge == "word":
        return _Answer(float(found[0].greedy), 1.0, "")
    return _Answer(found[0].logprob, found[0].tokens, "")


def _record(result: TaskResult, prompt: Prompt, answers: dict[str, _Answer]) -> None:
    native = answers["native"]
    sums = {name: one.score for name, one in answers.items()}
    group = prompt.question.group
    if len(prompt.ids) < SHORTEST_PROMPT:
        result.short.add(native.weight, sums, group)
        return
    result.scores.add(native.weight, sums, group)
    result.kinds.append(prompt.question.kind)
    result.lengths.append(len(prompt.ids))
    result.same.add(1.0, {name: float(one.said == native.said) for name, one in answers.items()})
    if native.likelihood:
        weight = native.likelihood.tokens
        logprobs = {name: one.likelihood.logprob for name, one in answers.items()}
        result.likelihood.add(weight, logprobs, group)
    for counts, kind in ((result.cut, "cut"), (result.looping, "looping")):
        for name, one in answers.items():
            counts[name] = counts.get(name, 0) + getattr(one, kind)


def _named(arms: Sequence[Arm], found: Sequence[_Answer]) -> dict[str, _Answer]:
    return {arm.name: one for arm, one in zip(arms, found, strict=True)}


def _chance(made: Sequence[Prompt]) -> float:
    return sum(1 / len(one.question.options) for one in made) / max(len(made), 1)


def capacity(made: Sequence[Prompt], answer_tokens: int) -> int:
    """Tokens of the longest prompt with all that may follow it."""
    return max(
        len(one.ids) + sum(len(part.ids) for part in one.continuations) + answer_tokens
        for one in made
    )
