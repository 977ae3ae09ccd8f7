"""Which class of task a turn is, by cheap patterns: it decides how exact the KV has to be."""

from __future__ import annotations

import re

from policies.base import Task, Turn

# Only this much of a message's beginning and end is looked at.
_WINDOW = 1000
# A message this long that ends in a question brings the passage it asks about.
_PASSAGE_CHARS = 500

_CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+[:({]|#include|\bimport \w+|\breturn \w+|\bfunction\s+\w+\(|=>|\);\n"
    r"|\b(?:python|javascript|typescript|java|c\+\+|sql|regex|html|css|bash|stack trace|compile[rs]?"
    r"|unit tests?|source code|algorithm|debug)\b",
    re.IGNORECASE,
)
_ARITHMETIC = re.compile(r"\d\s*[-+*/×÷^=<>]\s*[-(]?\d|\d\s*(?:plus|minus|times|divided by)\s*\d")
_MATH = re.compile(
    r"\b(?:calculate|compute|solve|equation|integral|derivative|polynomial|matrix|probability"
    r"|percent(?:age)?|square root|prove that|sum of|product of|remainder|arithmetic|algebra)\b|\d%",
    re.IGNORECASE,
)
_AMOUNT = re.compile(
    r"\bhow (?:many|much|long|far|old|fast|tall|big)\b|\bwhat is the (?:total|average|cost|price|difference)\b"
    r"|\b(?:in total|altogether|total (?:cost|number|amount|profit)|each|per|twice|half|times as)\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\w.])\$?\d[\d,.]*")
_QUOTE = re.compile(
    r"\b(?:quote|verbatim|word for word|exact(?:ly the)? (?:words?|wording|text|phrase|sentence)"
    r"|passage|according to (?:the|this) (?:text|document|article|passage|story|report|author)"
    r"|(?:from|in) the (?:text|document|article|passage|story) (?:above|below)?"
    r"|which (?:sentence|line|paragraph)|extract|copy the|cite)\b",
    re.IGNORECASE,
)


def task_class(turn: Turn) -> Task:
    """math (numbers to work out), quote (exact words or facts of a given passage), code or chat."""
    if turn.task is not None:
        return turn.task
    text = turn.text
    if len(text) > 2 * _WINDOW:
        text = f"{text[:_WINDOW]}\n{text[-_WINDOW:]}"
    if _CODE.search(text):
        return "code"
    if len(turn.text) >= _PASSAGE_CHARS and turn.text.rstrip().endswith(("?", ":")):
        # A passage's own figures are no sums to work out.
        return "quote"
    if _ARITHMETIC.search(text) or (_MATH.search(text) and _NUMBER.search(text)):
        return "math"
    if _AMOUNT.search(text) and len(_NUMBER.findall(text)) >= 2:
        return "math"
    return "quote" if _QUOTE.search(text) else "chat"
