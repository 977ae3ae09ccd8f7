"""Text that is scored by its likelihood: last words, programs, and prose."""

from __future__ import annotations

from pydantic import model_validator

from mapper.quality.tasks.base import Format, Question, Row

# Characters of prose before and in the part that is scored: about 600 and 130 tokens.
PROSE_CONTEXT, PROSE_SCORED = 2700, 600


class _LastWord(Row):
    text: str
    target: str

    @model_validator(mode="after")
    def _ends_in_target(self):
        if not self.target.strip() or not self.text.endswith(f" {self.target}"):
            raise ValueError("text does not end in the target")
        return self


class _Program(Row):
    prompt: str
    canonical_solution: str
    entry_point: str = ""
    test: str = ""


class Prose(Row):
    text: str


def _last_word(row: _LastWord) -> list[Question]:
    return [Question(row.text[: -len(row.target) - 1], reference=f" {row.target}")]


def _program(row: _Program) -> list[Question]:
    # A tokenizer may join the blanks before a word with the word: they stay on one side.
    body = row.canonical_solution.rstrip()
    return [Question(row.prompt.rstrip(" "), reference=body)]


def prose(row: Prose) -> list[Question]:
    """As many windows as the text has, each with its own context; shorter texts give none."""
    text, questions = row.text, []
    size = PROSE_CONTEXT + PROSE_SCORED
    for start in range(0, len(text) - size + 1, size):
        middle = text.find(" ", start + PROSE_CONTEXT)
        if 0 < middle < start + size:
            questions.append(Question(text[start:middle], reference=text[middle : start + size]))
    return questions


FORMATS = [
    Format("lambada", "cloze", "word", _LastWord, _last_word),
    Format("humaneval", "code", "likelihood", _Program, _program, share=0.5),
    Format("perplexity", "text", "likelihood", Prose, prose, examples=False, share=0.5),
]
