"""Multiple choice by log-likelihood."""

from __future__ import annotations

from pydantic import Field, model_validator

from mapper.quality.tasks.base import Format, Question, Row


class _Labelled(Row):
    label: int = Field(ge=0)

    def _options(self) -> list[str]:
        """The texts to choose from; each format below keeps them in its own way."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _label_is_an_option(self):
        if self.label >= len(self._options()):
            raise ValueError(f"label {self.label} of {len(self._options())} options")
        return self


class _Choices(_Labelled):
    question: str
    choices: list[str] = Field(min_length=2)
    subject: str = ""

    def _options(self) -> list[str]:
        return self.choices


class _Endings(_Labelled):
    activity_label: str
    ctx: str
    endings: list[str] = Field(min_length=2)

    def _options(self) -> list[str]:
        return self.endings


class _Solutions(_Labelled):
    goal: str
    sol1: str
    sol2: str

    def _options(self) -> list[str]:
        return [self.sol1, self.sol2]


class _YesNo(_Labelled):
    passage: str
    question: str

    def _options(self) -> list[str]:
        return ["no", "yes"]


class _Blank(_Labelled):
    sentence: str = Field(pattern="_")
    option1: str
    option2: str

    def _options(self) -> list[str]:
        return [self.option1, self.option2]


def _ask(prompt: str, row: _Labelled) -> list[Question]:
    return [Question(prompt, tuple(f" {option}" for option in row._options()), row.label)]


def _fill(row: _Blank) -> list[Question]:
    before, after = row.sentence.split("_", 1)
    options = tuple(f" {option}" for option in row._options())
    return [Question(before.rstrip(), options, row.label, suffix=after)]


def _choice_format(name: str, row: type[Row], questions, **options) -> Format:
    return Format(name, "choice", "choice", row, questions, **options)


FORMATS = [
    *(
        _choice_format(name, _Choices, lambda row: _ask(f"Question: {row.question}\nAnswer:", row))
        for name in ("arc_easy", "arc_challenge", "openbookqa", "mmlu")
    ),
    _choice_format(
        "hellaswag", _Endings, lambda row: _ask(f"{row.activity_label}: {row.ctx}", row)
    ),
    _choice_format("piqa", _Solutions, lambda row: _ask(f"Goal: {row.goal}\nAnswer:", row)),
    _choice_format(
        "boolq",
        _YesNo,
        lambda row: _ask(f"{row.passage}\nQuestion: {row.question}?\nAnswer:", row),
        per_character=False,
    ),
    _choice_format("winogrande", _Blank, _fill, per_character=False),
]
