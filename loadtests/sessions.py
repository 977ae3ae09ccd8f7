"""Sessions of 40 turns, put together from questions that both models have answered.

    python -m loadtests.sessions outcomes.jsonl sessions.jsonl
    baton replay sessions.jsonl --policy cascade --policy large

Which questions, how long runs, documents and answers are, and how long a user waits, is
drawn with a seed; the outcomes of both models and the small one's signals are those of the
question, untouched.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from router.offline.records import Item, read_items
from router.offline.sessions import ReplayTurn

TURNS = 40
_CHARS_PER_TOKEN = 4
# A system prompt, and answers, in tokens.
_SYSTEM = (50, 300)
_ANSWER = (20, 100)
_PAUSE_SECONDS = 40.0
# One pause in so many is long: the workers have forgotten the session after it.
_LONG_PAUSE_EVERY, _LONG_PAUSE_SECONDS = 50, 4000.0


@dataclass(frozen=True)
class Setting:
    """What conversations are like."""

    # Turns of a topic: one task, and mostly hard or mostly easy questions of it.
    run: tuple[int, int]
    # Share of a run's questions that are of its kind; the others are drawn from all.
    alike: float
    # Half of all people come with a document, and one turn in 25 brings another. Lengths in
    # tokens, log-normal: median, spread of the logarithm, most.
    opens_with_document: float
    brings_document: float
    document: tuple[float, float, int] = (1200, 0.8, 4000)


SETTINGS = {
    # Topics in runs, a few long documents among many short conversations: what chats are.
    "mixed": Setting((3, 8), 0.75, opens_with_document=0.5, brings_document=0.04),
    # Nothing but questions and answers: little to catch up on.
    "short contexts": Setting((3, 8), 0.75, opens_with_document=0.0, brings_document=0.0),
    # Every turn another topic: being on the right tier is no help for the turn after.
    "hardness without runs": Setting((1, 1), 0.0, opens_with_document=0.5, brings_document=0.04),
}


def mixed_sessions(
    items: Sequence[Item], count: int, seed: int, setting: Setting = SETTINGS["mixed"]
) -> dict[str, list[ReplayTurn]]:
    """`count` sessions; a question comes up at most once in a session.

    Hard is a question that the small model gets wrong. As many runs are hard as questions
    are, so that runs move questions together and change nothing else.
    """
    rng = random.Random(seed)
    by_task: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_task[item.task].append(item)
    return {
        name: _Session(name, by_task, rng, setting).turns
        for name in (f"session-{seed}-{number}" for number in range(count))
    }


class _Session:
    def __init__(
        self, name: str, by_task: dict[str, list[Item]], rng: random.Random, setting: Setting
    ) -> None:
        self.turns: list[ReplayTurn] = []
        self._name, self._rng, self._setting = name, rng, setting
        self._decks = {
            task: rng.sample(items, len(items)) for task, items in sorted(by_task.items())
        }
        self._prompt = rng.randint(*_SYSTEM)
        if rng.random() < setting.opens_with_document:
            self._prompt += self._document()
        while len(self.turns) < TURNS:
            self._run()

    def _run(self) -> None:
        rng = self._rng
        deck = self._decks[rng.choice([task for task, deck in self._decks.items() if deck])]
        hard = _hard(rng.choice(deck))
        for _ in range(rng.randint(*self._setting.run)):
            if not deck or len(self.turns) == TURNS:
                return
            place = len(deck) - 1
            if rng.random() < self._setting.alike:
                alike = (i for i in range(place, -1, -1) if _hard(deck[i]) == hard)
                place = next(alike, place)
            self._ask(deck.pop(place))

    def _ask(self, item: Item) -> None:
        rng, number = self._rng, len(self.turns) + 1
        if number > 1 and rng.random() < self._setting.brings_document:
            self._prompt += self._document()
        self._prompt += max(1, item.length // _CHARS_PER_TOKEN)
        idle = rng.expovariate(1 / _PAUSE_SECONDS)
        if rng.randrange(_LONG_PAUSE_EVERY) == 0:
            idle = _LONG_PAUSE_SECONDS
        answer = rng.randint(*_ANSWER)
        self.turns.append(
            ReplayTurn(
                session=self._name,
                turn=number,
                prompt_tokens=self._prompt,
                completion_tokens=answer,
                text=item.text,
                idle_seconds=idle if number > 1 else 0.0,
                prompt_logprob=item.prompt_logprob,
                signals=item.signals,
                quality={"small": item.small.quality, "large": item.large.quality},
            )
        )
        self._prompt += answer

    def _document(self) -> int:
        median, spread, most = self._setting.document
        return min(most, round(self._rng.lognormvariate(math.log(median), spread)))


def _hard(item: Item) -> bool:
    return item.small.quality < 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("outcomes", type=Path, help="JSONL as `baton outcomes` writes it")
    parser.add_argument("out", type=Path, help="JSONL for `baton replay`")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--setting", choices=SETTINGS, default="mixed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    items, _ = read_items(arguments.outcomes)
    sessions = mixed_sessions(
        items, arguments.sessions, arguments.seed, SETTINGS[arguments.setting]
    )
    lines = [turn.model_dump_json() for turns in sessions.values() for turn in turns]
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
