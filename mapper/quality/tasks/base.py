"""What a task is: a row format, the questions made of a row, and how answers are judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mapper.errors import BadTask

TaskClass = Literal["choice", "exact", "passage", "cloze", "math", "code", "text"]
# choice: the right option has the highest log-likelihood a character (options that are short
# labels, or that share a suffix: the highest log-likelihood). answer: the greedy answer equals
# an accepted one. overlap: F1 of its words with the best accepted one. number: its last number
# is the right one. word: the reference is what greedy decoding gives. likelihood: log-likelihood
# of the reference, no right or wrong.
Judge = Literal["choice", "answer", "overlap", "number", "word", "likelihood"]


class Row(BaseModel):
    """One line of a task file. Unknown fields are refused: they are mostly typing errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | int | None = None


@dataclass(frozen=True)
class Question:
    """One thing to ask. Exactly what the judge needs is set.

    Attributes:
        prompt: what stands before the answer, after the worked examples.
        options, label: of multiple choice, and the right one's index.
        suffix: text after each option; if any, it alone is scored, else the option is.
        answers: accepted texts, the first one for worked examples.
        reference: text whose likelihood is scored.
        kind: a finer class that is also reported, as "number" or "name".
        group: the row it was made of; questions of one row are not independent of each other.
    """

    prompt: str
    options: tuple[str, ...] = ()
    label: int = 0
    suffix: str = ""
    answers: tuple[str, ...] = ()
    reference: str = ""
    kind: str = ""
    group: int = 0

    @property
    def solution(self) -> str:
        """What follows the prompt in a worked example."""
        if self.options:
            return self.options[self.label] + self.suffix
        return self.reference or self.answers[0]


@dataclass(frozen=True)
class Format:
    """A kind of task file, `<name>.jsonl`.

    Attributes:
        examples: whether prompts begin with worked examples (else they are long by themselves).
        per_character: whether options are compared by log-likelihood a character.
        answer_tokens, stops: where a generated answer ends; an answer that reaches the number of
            tokens is counted as cut.
        share: of the questions and the time that other tasks get.
    """

    name: str
    task_class: TaskClass
    judge: Judge
    row: type[Row]
    questions: Callable[[Any], Sequence[Question]]
    examples: bool = True
    per_character: bool = True
    answer_tokens: int = 24
    stops: tuple[str, ...] = ("\n",)
    share: float = 1.0

    @property
    def generates(self) -> bool:
        return self.judge in ("answer", "overlap", "number")

    @property
    def says(self) -> bool:
        """Whether there is an answer that can be the same as another one: not of a likelihood alone."""
        return self.generates or self.judge == "choice"


@dataclass(frozen=True)
class Task:
    """Questions of one file, and worked examples from its other rows."""

    format: Format
    questions: list[Question]
    examples: list[Question]

    @property
    def name(self) -> str:
        return self.format.name

    def shared_prompt(self, tokens: Callable[[str], int], shortest: int) -> str:
        """Worked examples that stand before every question, `shortest` tokens of them."""
        text = ""
        for example in self.examples if self.format.examples else ():
            if tokens(text) >= shortest:
                break
            text += f"{example.prompt}{example.solution}\n\n"
        return text


def read_rows(path: Path, row: type[Row]) -> list[Any]:
    """Every line of a JSONL file.

    Raises:
        BadTask: a line is no JSON object of this format; the message has file and line number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTask(f"{path}: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(row.model_validate_json(line))
        except ValidationError as error:
            raise BadTask(f"{path}:{number}: {_reason(line, error)}") from None
    if not rows:
        raise BadTask(f"{path} has no questions")
    return rows


def _reason(line: str, error: ValidationError) -> str:
    try:
        json.loads(line)
    except ValueError as bad:
        return f"no JSON: {bad}"
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the line"
    return f"{place}: {first['msg']}"
