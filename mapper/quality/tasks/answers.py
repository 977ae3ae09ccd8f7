"""Answers that are generated: spans and conversations about a passage, and sums."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import Field

from mapper.quality.tasks.base import Format, Question, Row

# Turns of a conversation that are asked, counted from 1: early enough to be in every
# conversation, late enough that the prompt is long. What was said before is given as it was.
ASKED_TURNS = (6, 8, 10)
# An answer repeats itself when its last tokens are this many copies of one piece.
LOOP_COPIES = 3
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class _Spans(Row):
    title: str = ""
    context: str
    question: str
    answers: list[str] = Field(min_length=1)


class _Turn(Row):
    question: str
    answer: str
    answers: list[str] = Field(min_length=1)


class _Conversation(Row):
    source: str = ""
    story: str
    turns: list[_Turn] = Field(min_length=1)


class _Sum(Row):
    question: str
    answer: str
    final: str = Field(pattern=r"^-?[\d,]*\.?\d+$")


def _span(row: _Spans) -> list[Question]:
    prompt = f"{row.context}\nQuestion: {row.question}\nAnswer:"
    answers = tuple(f" {answer}" for answer in row.answers)
    return [Question(prompt, answers=answers, kind=span_kind(row.answers[0]))]


def _talk(row: _Conversation) -> list[Question]:
    questions, text = [], row.story
    for number, turn in enumerate(row.turns, start=1):
        text += f"\n\nQ: {turn.question}\nA:"
        if number in ASKED_TURNS:
            answers = (turn.answer, *turn.answers)
            questions.append(Question(text, answers=tuple(f" {answer}" for answer in answers)))
        text += f" {turn.answer}"
    return questions


def _sum(row: _Sum) -> list[Question]:
    worked = re.sub(r"<<.*?>>", "", row.answer)
    prompt = f"Question: {row.question}\nAnswer:"
    return [Question(prompt, answers=(row.final,), reference=f" {worked}")]


FORMATS = [
    Format("squad", "exact", "answer", _Spans, _span, share=2.0),
    Format("coqa", "passage", "overlap", _Conversation, _talk, examples=False, share=2.0),
    Format(
        "gsm8k", "math", "number", _Sum, _sum,
        answer_tokens=160, stops=("\n\n", "Question:"), share=0.3,
    ),
]  # fmt: skip


def span_kind(answer: str) -> str:
    """What is quoted: a number, a name (every long word has a capital), or any other span."""
    if re.search(r"\d", answer):
        return "number"
    words = [word for word in re.findall(r"\w+", answer) if len(word) > 3]
    return "name" if words and all(word[0].isupper() for word in words) else "span"


def normalise(answer: str) -> str:
    """Lower case without articles, punctuation and surplus blanks, as SQuAD compares spans.

    A decimal point stays: 3.5 is not 35. Thousands' commas go.
    """
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer.lower())
    answer = re.sub(r"[^\w\s.]", " ", answer)
    words = (word.strip(".") for word in answer.split())
    return " ".join(word for word in words if word and word not in {"a", "an", "the"})


def exact(spoken: str, accepted: Iterable[str]) -> float:
    return float(normalise(spoken) in {normalise(answer) for answer in accepted})


def overlap(spoken: str, accepted: Iterable[str]) -> float:
    """F1 of the words in common with the accepted answer that is closest, as CoQA scores."""
    return max(_f1(normalise(spoken).split(), normalise(answer).split()) for answer in accepted)


def _f1(one: Sequence[str], other: Sequence[str]) -> float:
    if not one or not other:
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))


def last_number(spoken: str) -> str | None:
    """The last number of a worked solution, after its #### mark if it has one."""
    marked = spoken.rsplit("####", 1)[-1] if "####" in spoken else spoken
    found = _NUMBER.findall(marked)
    return _plain(found[-1]) if found else None


def same_number(spoken: str, final: str) -> float:
    return float(last_number(spoken) == _plain(final))


def _plain(number: str) -> str:
    """7.50, 7.5 and +7.5 alike; no thousands' commas."""
    return f"{float(number.replace(',', '')):.12g}"


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the tokens end in `LOOP_COPIES` copies of a piece that is at least 12 tokens in all."""
    for size in range(1, len(tokens) // LOOP_COPIES + 1):
        piece = list(tokens[-size:])
        copies = max(LOOP_COPIES, -(-12 // size))
        if list(tokens[-size * copies :]) == piece * copies:
            return True
    return False
