"""What a classifier sees of a turn: hashed n-grams, lengths and the conversation's shape."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from zlib import crc32

from policies.base import Turn
from policies.tasks import task_class

BUCKETS = 4096
# Of the beginning and of the end of the last message, and of the beginning of those before.
_WINDOW = 700
_EARLIER_WINDOW = 300
_WORD = re.compile(r"[a-z]+|\d+|[^\sa-z\d]")


def features(turn: Turn) -> dict[str, float]:
    """Named features. Words and word pairs of the last message are `h<bucket>`, of norm one;
    words of the user's messages before it are `e<bucket>`, likewise."""
    text = turn.text
    if len(text) > 2 * _WINDOW:
        text = f"{text[:_WINDOW]}\n{text[-_WINDOW:]}"
    words = _WORD.findall(text.lower())
    before = [word for one in turn.earlier for word in _WORD.findall(one[:_EARLIER_WINDOW].lower())]
    found = _hashed("h", [*words, *map(" ".join, pairwise(["^", *words]))])
    found |= _hashed("e", before)
    found |= {
        "chars": math.log1p(len(turn.text)),
        "words": math.log1p(len(words)),
        "word_length": sum(map(len, words)) / max(1, len(words)),
        "numbers": math.log1p(sum(word[0].isdigit() for word in words)),
        "marks": sum(not word[0].isalnum() for word in words) / max(1, len(words)),
        "capitals": sum(map(str.isupper, text)) / max(1, len(text)),
        "question": float(text.rstrip().endswith("?")),
        "lines": math.log1p(text.count("\n")),
        "turn": math.log1p(turn.number),
        # Beside the message itself, so that it is nothing in a conversation of one turn.
        "context": math.log1p(max(0, turn.prompt_chars - len(turn.text))),
        "earlier": math.log1p(sum(map(len, turn.earlier))),
        "tools": float(turn.has_tools),
        "schema": float(turn.has_schema),
        f"task_{task_class(turn)}": 1.0,
    }
    if turn.prompt_logprob is not None:
        found["prompt_logprob"] = turn.prompt_logprob
    return found


def is_hashed(name: str) -> bool:
    return name[0] in "he" and name[1:].isdigit()


def _hashed(kind: str, grams: list[str]) -> dict[str, float]:
    counts: dict[int, int] = {}
    for gram in grams:
        bucket = crc32(gram.encode()) % BUCKETS
        counts[bucket] = counts.get(bucket, 0) + 1
    norm = math.sqrt(sum(count * count for count in counts.values())) or 1.0
    return {f"{kind}{bucket}": count / norm for bucket, count in counts.items()}
