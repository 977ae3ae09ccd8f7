"""What a classifier sees of a turn: hashed n-grams, lengths and the conversation's shape."""

from __future__ import annotations

import math
import re
from zlib import crc32

from policies.base import Turn
from policies.tasks import task_class

BUCKETS = 4096
# The classifier reads this much of the beginning and of the end of a message.
_WINDOW = 1000
_WORD = re.compile(r"[a-z]+|\d+|[^\sa-z\d]")


def features(turn: Turn) -> dict[str, float]:
    """Named features; words and word pairs of the last message as `h<bucket>`, of norm one."""
    text = turn.text
    if len(text) > 2 * _WINDOW:
        text = f"{text[:_WINDOW]}\n{text[-_WINDOW:]}"
    words = _WORD.findall(text.lower())
    found = _ngrams(words)
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
        "prompt": math.log1p(turn.prompt_chars),
        "earlier": math.log1p(sum(map(len, turn.earlier))),
        "tools": float(turn.has_tools),
        "schema": float(turn.has_schema),
        f"task_{task_class(turn)}": 1.0,
    }
    if turn.prompt_logprob is not None:
        found["prompt_logprob"] = turn.prompt_logprob
    return found


def _ngrams(words: list[str]) -> dict[str, float]:
    counts: dict[int, int] = {}
    before = "^"
    for word in words:
        for gram in (word, f"{before} {word}"):
            bucket = crc32(gram.encode()) % BUCKETS
            counts[bucket] = counts.get(bucket, 0) + 1
        before = word
    norm = math.sqrt(sum(count * count for count in counts.values())) or 1.0
    return {f"h{bucket}": count / norm for bucket, count in counts.items()}
