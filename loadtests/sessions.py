"""Sessions of 40 mixed turns, put together from questions that both models have answered.

Topics come in runs, as in real conversations: each run is of one task. Which questions, how
long runs, documents and answers are, and how long a user waits, is drawn with a seed; the
outcomes of both models and the small one's signals are those of the question, untouched.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from router.offline.records import Item
from router.offline.sessions import ReplayTurn

TURNS = 40
_RUN = (3, 8)
# The document that a session begins with, and answers, in tokens.
_DOCUMENT = (200, 1500)
_ANSWER = (20, 100)
_CHARS_PER_TOKEN = 4
_PAUSE_SECONDS = 40.0
# One pause in so many is long: the workers have forgotten the session after it.
_LONG_PAUSE_EVERY, _LONG_PAUSE_SECONDS = 50, 4000.0


def mixed_sessions(items: Sequence[Item], count: int, seed: int) -> dict[str, list[ReplayTurn]]:
    """`count` sessions; a question comes up at most once in a session."""
    rng = random.Random(seed)
    by_task: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_task[item.task].append(item)
    return {
        f"session-{number}": _session(f"session-{number}", by_task, rng) for number in range(count)
    }


def _session(name: str, by_task: dict[str, list[Item]], rng: random.Random) -> list[ReplayTurn]:
    decks = {task: rng.sample(items, len(items)) for task, items in sorted(by_task.items())}
    turns: list[ReplayTurn] = []
    prompt = rng.randint(*_DOCUMENT)
    while len(turns) < TURNS:
        task = rng.choice([task for task, deck in decks.items() if deck])
        for _ in range(rng.randint(*_RUN)):
            if not decks[task] or len(turns) == TURNS:
                break
            item = decks[task].pop()
            prompt += max(1, item.length // _CHARS_PER_TOKEN)
            answer = rng.randint(*_ANSWER)
            turns.append(_turn(name, len(turns) + 1, item, prompt, answer, rng))
            prompt += answer
    return turns


def _turn(
    name: str, number: int, item: Item, prompt: int, answer: int, rng: random.Random
) -> ReplayTurn:
    idle = rng.expovariate(1 / _PAUSE_SECONDS)
    if rng.randrange(_LONG_PAUSE_EVERY) == 0:
        idle = _LONG_PAUSE_SECONDS
    return ReplayTurn(
        session=name,
        turn=number,
        prompt_tokens=prompt,
        completion_tokens=answer,
        text=item.text,
        idle_seconds=idle if number > 1 else 0.0,
        prompt_logprob=item.prompt_logprob,
        signals=item.signals,
        quality={"small": item.small.quality, "large": item.large.quality},
    )
