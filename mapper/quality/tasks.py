"""Task files: JSONL items turned into long prompts with options or answers to judge by."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Prompts get worked examples of the same task until they are at least this long: the native
# tail is then at most an eighth of what is judged.
SHORTEST_PROMPT = 512


@dataclass(frozen=True)
class Question:
    """One item: `options` with the right one's index, or (no options) accepted `answers`."""

    text: str
    options: tuple[str, ...]
    label: int
    answers: tuple[str, ...] = ()

    @property
    def solution(self) -> str:
        return self.options[self.label] if self.options else self.answers[0]


@dataclass(frozen=True)
class Task:
    name: str
    questions: list[Question]
    examples: list[Question]


def read_tasks(folder: Path, *, items: int) -> Iterator[Task]:
    """Every task whose file is in `folder`, with `items` questions drawn with a fixed seed.

    Examples for the prompt are drawn from the rest of the file: no question is its own example.
    """
    for name, parse in _PARSERS.items():
        path = Path(folder) / f"{name}.jsonl"
        if not path.is_file():
            continue
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        random.Random(0).shuffle(rows)
        questions = [question for row in rows for question in parse(row)]
        yield Task(name, questions[:items], questions[items : items + 60])


def build_prompt(task: Task, question: Question, tokens: Callable[[str], int]) -> str:
    """Examples, then the question; all questions of a task share the examples."""
    return few_shot(task, tokens) + question.text


def few_shot(task: Task, tokens: Callable[[str], int]) -> str:
    text = ""
    for example in task.examples:
        if tokens(text) >= SHORTEST_PROMPT:
            break
        text += f"{example.text}{example.solution}\n\n"
    return text


def normalise(answer: str) -> str:
    """Lower case without articles, punctuation and surplus blanks, as SQuAD compares spans."""
    answer = re.sub(r"[^\w\s.]", " ", answer.lower()).strip(" .")
    return " ".join(word for word in answer.split() if word not in {"a", "an", "the"})


def _choice(question: str, key: str = "choices") -> Callable[[dict], list[Question]]:
    def parse(row: dict) -> list[Question]:
        text = f"Question: {row[question]}\nAnswer:"
        return [Question(text, tuple(f" {option}" for option in row[key]), row["label"])]

    return parse


def _hellaswag(row: dict) -> list[Question]:
    text = f"{row['activity_label']}: {row['ctx']}"
    return [Question(text, tuple(f" {ending}" for ending in row["endings"]), row["label"])]


def _piqa(row: dict) -> list[Question]:
    text = f"Goal: {row['goal']}\nAnswer:"
    return [Question(text, (f" {row['sol1']}", f" {row['sol2']}"), row["label"])]


def _boolq(row: dict) -> list[Question]:
    text = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return [Question(text, (" no", " yes"), row["label"])]


def _squad(row: dict) -> list[Question]:
    text = f"Passage: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return [Question(text, (), 0, tuple(f" {answer}" for answer in row["answers"]))]


_PARSERS: dict[str, Callable[[dict], list[Question]]] = {
    "arc_easy": _choice("question"),
    "arc_challenge": _choice("question"),
    "openbookqa": _choice("question"),
    "mmlu": _choice("question"),
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "boolq": _boolq,
    "squad": _squad,
}
