"""Drift over long conversations on real workers: with and without re-anchoring, beside native.

    python -m loadtests.drift --turns 10 20 --out build/drift

Passage question answering, greedy, in sessions that go up once, go down once, or change model
at every turn. Each pattern runs three times on the same passages: on mapped KV that is never
repaired, on mapped KV that audits re-anchor, and natively. After each turn its answer is
scored on the KV that it was generated on and on a native prefill under a salt of its own;
their mean difference is the turn's drift, and that of the native run is the noise floor.
Writes drift-TURNS.json and drift-TURNS.png. Needs about 6 GB of memory and, with 20 turns and
one session of each kind on two cores, some five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtests.realstack import Client, fresh, passages, real_stack

PATTERNS = ("up", "down", "alternating")
DRIFTING, REANCHORED, NATIVE = "drifting", "reanchored", "native"
ARMS = (DRIFTING, REANCHORED, NATIVE)
# Never past its budget, and audited only where the policy says so: all that shall differ
# between the arms is the re-anchoring.
SETTINGS = {
    "budget_nats": 1e9,
    "audit_rate": 0.0,
    "audit_rates": {REANCHORED: 1.0},
    "audit_above_tokens": None,
    "audit_wait_seconds": 600.0,
    "audit_idle_seconds": 0.0,
    "audit_share": 1.0,
    "ahead_above": None,
}
_PLAIN = {"kind": "pinned", "tier": "large"}
LAST = 5
_SWITCH_AT = 0.4


@dataclass
class Turn:
    tier: str
    kv: str
    reason: str
    text: str
    # None when the answer's tokens could not be found again in the conversation's.
    drift: float | None
    first_token: float | None
    cached_tokens: int
    prompt_tokens: int


@dataclass
class Talk:
    """One session of one arm."""

    arm: str
    pattern: str
    number: int
    passage: str
    questions: list[str]
    session: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = fresh(f"{self.arm}-{self.pattern}-{self.number}")

    def tier(self, index: int) -> str:
        # Before the middle, so that the last turns are those after the switch.
        switched = index >= int(_SWITCH_AT * len(self.questions))
        return {
            "up": "large" if switched else "small",
            "down": "small" if switched else "large",
            "alternating": ("small", "large")[index % 2],
        }[self.pattern]


async def take_turn(client: Client, talk: Talk, index: int, tokens: int) -> None:
    question, tier = talk.questions[index], talk.tier(index)
    # A line of its own first, so that no two sessions have a page of the passage in common.
    content = question if index else f"({talk.session})\n{talk.passage}\n\n{question}"
    talk.messages.append({"role": "user", "content": content})
    if talk.arm == NATIVE:
        reply = await client.native(tier, talk.messages, talk.session, tokens)
        salt, extra_key = talk.session, None
    else:
        reply = await client.turn(tier, talk.messages, talk.session, talk.arm, tokens)
        epoch = (await client.session(talk.session))["timeline"][-1]["epoch"]
        salt, extra_key = "default", epoch and f"lossy:{talk.session}:{epoch}"
    ids, start = await client.ids(tier, talk.messages, reply.text or " ")
    drift = first = None
    end = min(len(ids), start + reply.completion_tokens)
    if end > start:
        found = await client.score(tier, ids[:end], start, salt, extra_key)
        other = await client.score(tier, ids[:end], start, f"reference-{talk.session}")
        each = [a - b for a, b in zip(found.logprobs, other.logprobs, strict=True)]
        drift, first = fmean(each), each[0]
    talk.turns.append(
        Turn(
            tier, reply.kv or "none", reply.reason, reply.text, drift, first,
            reply.cached_tokens, reply.prompt_tokens,
        )
    )  # fmt: skip
    talk.messages.append({"role": "assistant", "content": reply.text})


async def converse(
    client: Client, talks: list[Talk], turns: int, tokens: int, minutes: float
) -> int:
    """All sessions in step; between turns the audits come to their end, as between a user's.

    Returns how many turns there were time for.
    """
    until = time.monotonic() + minutes * 60
    for index in range(turns):
        if time.monotonic() > until:
            return index
        await asyncio.gather(*(take_turn(client, talk, index, tokens) for talk in talks))
        for talk in talks:
            if talk.arm == REANCHORED:
                await client.audits_done(talk.session)
        print(f"turn {index + 1}/{turns}", flush=True)
    return turns


def summarise(talks: list[Talk], turns: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for pattern in PATTERNS:
        result[pattern] = {}
        native = {t.number: t for t in talks if (t.arm, t.pattern) == (NATIVE, pattern)}
        for arm in ARMS:
            mine = [t for t in talks if (t.arm, t.pattern) == (arm, pattern)]
            if not mine:
                continue
            by_turn = [_mean(t.turns[i].drift for t in mine) for i in range(turns)]
            agreement = [
                _mean(_f1(t.turns[i].text, native[t.number].turns[i].text) for t in mine)
                for i in range(turns)
            ]
            same = [
                t.turns[i].text == native[t.number].turns[i].text
                for t in mine for i in range(turns)
            ]  # fmt: skip
            result[pattern][arm] = {
                "drift_by_turn": by_turn,
                "drift": _mean(by_turn),
                "drift_last_turns": _mean(by_turn[-LAST:]),
                "largest_absolute_drift_last_turns": max(
                    abs(d)
                    for t in mine
                    for d in [x.drift for x in t.turns[-LAST:]]
                    if d is not None
                ),
                "first_token_drift": _mean(x.first_token for t in mine for x in t.turns),
                "answer_f1_with_native_by_turn": agreement,
                "answer_f1_with_native": _mean(agreement),
                "answer_f1_with_native_last_turns": _mean(agreement[-LAST:]),
                "same_answer_share": fmean(same),
                "kv": dict(Counter(f"{x.kv}:{x.reason}" for t in mine for x in t.turns)),
            }
    return result


def plot(path: Path, summary: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(summary), figsize=(4.5 * len(summary), 6.5), squeeze=False
    )
    for column, (pattern, arms) in enumerate(summary.items()):
        for arm, values in arms.items():
            drifts = values["drift_by_turn"]
            at = range(1, len(drifts) + 1)
            axes[0][column].plot(at, drifts, marker=".", label=arm)
            axes[1][column].plot(at, values["answer_f1_with_native_by_turn"], marker=".", label=arm)
        axes[0][column].set_title(pattern)
        axes[1][column].set_xlabel("turn")
    axes[0][0].set_ylabel("drift (nats per token)")
    axes[1][0].set_ylabel("F1 with the native run's answer")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _mean(values: Any) -> float | None:
    values = [value for value in values if value is not None]
    return fmean(values) if values else None


def _f1(one: str, other: str) -> float:
    """Of the words of two answers."""
    a, b = Counter(one.lower().split()), Counter(other.lower().split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if a or b else 1.0


async def measure(stack: Any, options: argparse.Namespace, turns: int) -> dict[str, Any]:
    material = passages(options.passages, options.sessions, turns)
    talks = [
        Talk(arm, pattern, number, passage, questions)
        for arm in ARMS
        for pattern in options.patterns
        for number, (passage, questions) in enumerate(material)
    ]
    client = Client(stack)
    began = time.monotonic()
    try:
        turns = await converse(client, talks, turns, options.tokens, options.minutes)
    finally:
        await client.close()
    return {
        "turns": turns,
        "sessions": options.sessions,
        "answer_tokens": options.tokens,
        "seconds": round(time.monotonic() - began, 1),
        "patterns": summarise(talks, turns),
        "talks": [
            {"arm": t.arm, "pattern": t.pattern, "turns": [asdict(x) for x in t.turns]}
            for t in talks
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 20], help="of a session")
    parser.add_argument("--sessions", type=int, default=1, help="of each pattern and arm")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--minutes", type=float, default=10, help="of each length, at most")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument(
        "--passages", type=Path, help='.jsonl of {"story", "turns": [{"question"}]}'
    )
    parser.add_argument("--out", type=Path, default=Path("build/drift"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with real_stack(SETTINGS, {DRIFTING: _PLAIN, REANCHORED: _PLAIN}) as stack:
        for turns in options.turns:
            report = asyncio.run(measure(stack, options, turns))
            (options.out / f"drift-{turns}.json").write_text(json.dumps(report, indent=1))
            shown = {name: arms for name, arms in report["patterns"].items() if arms}
            plot(options.out / f"drift-{turns}.png", shown)
            for pattern, arms in shown.items():
                for arm, values in arms.items():
                    short = {name: v for name, v in values.items() if "by_turn" not in name}
                    print(turns, "turns,", pattern, arm, json.dumps(short), flush=True)


if __name__ == "__main__":
    main()
