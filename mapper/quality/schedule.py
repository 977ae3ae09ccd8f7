"""How long a run will take, how much of it fits into the time there is, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mapper.quality.batch import CacheBatch
from mapper.quality.conversations import Conversation
from mapper.quality.questions import Prompt
from mapper.quality.reader import Reader
from mapper.quality.settings import TAILS, Settings
from mapper.quality.tasks import Task

# A part may overrun its own estimate by this factor before it is ended early.
SLACK = 1.5
# Floors and controls are measured on this share of the conversations and questions, and on
# this many at least: they are far from everything else.
EXTRAS_SHARE, FEWEST_EXTRAS = 0.2, 4
# Every class of answers rests on the KL of dialogues, and it takes few of them to be precise.
DIALOGUE_SHARE = 0.35
# Seconds for loading, layer figures, plots.
OVERHEAD = 45.0
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
    """One part of a run: at most `items` items of `seconds` each, of which `fitting` are done.

    `once`: seconds that it costs whatever the number of items.
    """

    name: str
    items: int
    seconds: float
    once: float = 0.0
    fitting: int = 0

    @property
    def total(self) -> float:
        return self.once + self.fitting * self.seconds


def plan(
    reader: Reader,
    talks: Sequence[Conversation],
    asked: Sequence[tuple[Task, Sequence[Prompt]]],
    settings: Settings,
    variants: int,
) -> list[Part]:
    """What a conversation and a question of each task cost, and how many there is time for.

    `reader` has the native arm, `variants` that all items are put to, and the others.
    """
    pace = Pace.measure(reader)
    # A long run's share of the arms that only some items are put to.
    others = len(reader.arms) - 1 - variants
    rows = 1 + variants + EXTRAS_SHARE * others
    prompt = sum(talk.prompt for talk in talks) / len(talks)
    answer = sum(len(talk.ids) - talk.prompt for talk in talks) / len(talks)
    continued = answer * rows + variants * (settings.tail + answer)
    continued += sum(length + answer for length in TAILS if length not in (1, settings.tail))
    seconds = (prompt + answer) * pace.source + prompt * (pace.target + pace.convert)
    parts = [Part("dialogues", len(talks), seconds + continued * pace.target)]
    for task, made in asked:
        fresh = sum(len(one.ids) for one in made) / len(made) - _shared(made)
        options = sum(len(part.ids) for one in made for part in one.continuations) / len(made)
        seconds = (fresh + options) * pace.source
        seconds += max(0.0, fresh - settings.tail) * (pace.target + pace.convert)
        seconds += (settings.tail + options) * pace.target * rows
        if task.format.generates:
            seconds += task.format.answer_tokens * pace.step
        # The worked examples, twice on the target for the splice, and the arms of a few items.
        once = _shared(made) * (pace.source + 2 * pace.target + pace.convert)
        once += FEWEST_EXTRAS * (settings.tail + options) * pace.target * others
        parts.append(Part(task.name, len(made), seconds, once))
    share(parts, 60 * settings.minutes - OVERHEAD if settings.minutes else float("inf"))
    return parts


def extras(items: int) -> int:
    """How many of the items floors, controls and comparators are measured on."""
    return max(FEWEST_EXTRAS, round(EXTRAS_SHARE * items))


def share(parts: Sequence[Part], budget: float) -> None:
    """Dialogues come first: they may have `DIALOGUE_SHARE` of the time, the tasks get the rest."""
    dialogues, *tasks = parts
    fit([dialogues], budget * (DIALOGUE_SHARE if tasks else 1))
    fit(tasks, budget - dialogues.total)


def fit(parts: Sequence[Part], budget: float) -> None:
    """Sets how many items of each part fit into `budget` seconds, all reduced by one factor."""
    total = sum(part.items * part.seconds for part in parts)
    left = max(0.0, budget - sum(part.once for part in parts))
    factor = min(1.0, left / total) if total else 1.0
    for part in parts:
        part.fitting = max(1, int(part.items * factor))


def stopwatch(part: Part, end: float) -> Callable[[], bool]:
    """Whether there is time for another item: neither the part nor the run is overdue. A run without an end has no
    overdue parts."""
    if end == float("inf"):
        return lambda: True
    deadline = min(end, time.monotonic() + SLACK * part.total + 5)
    return lambda: time.monotonic() < deadline


def _timed(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start


def _shared(made: Sequence[Prompt]) -> int:
    """Tokens that the prompts of a task begin with, roughly: those of the first two."""
    if len(made) < 2:
        return 0
    one, other = made[0].ids, made[1].ids
    size = min(len(one), len(other))
    return int((one[:size] == other[:size]).long().cumprod(0).sum())
