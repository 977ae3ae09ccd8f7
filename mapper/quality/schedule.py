"""How long a run will take, how much of it fits into the time there is, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mapper.quality.batch import CacheBatch
from mapper.quality.reader import Reader

# A part may overrun its own estimate by this factor before it is ended early.
SLACK = 1.3
_PROBE_TOKENS = 128


@dataclass(frozen=True)
class Pace:
    """Measured seconds a token: prefill of both models, conversion by all arms, decode steps."""

    source: float
    target: float
    convert: float
    step: float

    @classmethod
    def measure(cls, reader: Reader) -> Pace:
        """A few short passes; some seconds on two cores with the demo's models."""
        ids = torch.randint(1, reader.source.model.spec.vocab_size, (2 * _PROBE_TOKENS,))
        head, tail = ids.split(_PROBE_TOKENS)
        variants = [arm for arm in reader.arms if arm.role == "variant"]

        def prefill(batch: CacheBatch) -> float:
            batch.run(head, 0)
            batch.logprobs(batch.run(tail, len(head))[:, -1])
            return _timed(lambda: batch.run(tail, len(head), slice(0, 1))) / len(tail)

        source, target = prefill(reader.source), prefill(reader.native)
        start = time.monotonic()
        reader.load(ids)
        whole = time.monotonic() - start
        convert = max(0.0, whole / len(ids) - source - target)
        step = _timed(lambda: reader.batch.run(ids[:1], len(head), slice(0, 1 + len(variants))))
        reader.keep(0)
        return cls(source, target, convert, step)


@dataclass
class Part:
    """One part of a run: at most `items` items of `seconds` each, of which `fitting` are done."""

    name: str
    items: int
    seconds: float
    fitting: int = 0


def fit(parts: Sequence[Part], budget: float) -> None:
    """Sets how many items of each part fit into `budget` seconds, all reduced by one factor."""
    total = sum(part.items * part.seconds for part in parts)
    factor = min(1.0, budget / total) if total else 1.0
    for part in parts:
        part.fitting = max(1, int(part.items * factor))


def stopwatch(part: Part, end: float) -> Callable[[], bool]:
    """Whether there is time for another item: neither the part nor the run is overdue."""
    deadline = min(end, time.monotonic() + SLACK * part.fitting * part.seconds + 5)
    return lambda: time.monotonic() < deadline


def _timed(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start
