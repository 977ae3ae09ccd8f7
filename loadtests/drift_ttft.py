"""Time to first token with audits on and off, under steady load on real workers.

    python -m loadtests.drift_ttft --minutes 4 --out build/drift

Users hold conversations that go up, with a pause to read after each answer. Blocks in which
every lossy turn is audited alternate with blocks in which none is, in one run on one stack;
what differs is the policy's audit rate alone. Reports the median time to first token of each
kind of block, their ratio and its 95 % interval, bootstrapped over sessions, and how many
audits ran or were dropped for a busy worker. Writes ttft.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.realstack import Client, fresh, passages, real_stack

AUDITED, UNAUDITED = "audited", "unaudited"
SETTINGS = {
    "budget_nats": 1e9,
    "audit_rate": 0.0,
    "audit_rates": {AUDITED: 1.0},
    "audit_above_tokens": None,
    "ahead_above": None,
}
_PLAIN = {"kind": "pinned", "tier": "large"}
_TIERS = ("small", "large", "large", "large")
_DRAWS = 2000


async def user(
    client: Client, material: list, policy: str, until: float, chance: random.Random, pause: float,
    tokens: int, found: list[tuple[str, list[float]]],
) -> None:  # fmt: skip
    """Conversations one after the other; adds (policy, seconds to first token on each turn)."""
    await asyncio.sleep(chance.uniform(0, pause))
    while time.monotonic() < until:
        passage, questions = chance.choice(material)
        session, messages, times = fresh(policy), [], []
        for index, tier in enumerate(_TIERS):
            question = questions[index]
            content = question if index else f"({session})\n{passage}\n\n{question}"
            messages.append({"role": "user", "content": content})
            reply = await client.turn(tier, messages, session, policy, tokens)
            times.append(reply.ttft)
            messages.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(chance.uniform(0.5, 1.5) * pause)
        found.append((policy, times))


async def run(stack: Any, options: argparse.Namespace) -> dict[str, Any]:
    client = Client(stack)
    material = passages(options.passages, 20, len(_TIERS))
    chance = random.Random(options.seed)
    warm, found = [], []
    block = options.minutes * 60 / options.blocks

    async def one_block(policy: str, seconds: float, into: list) -> None:
        until = time.monotonic() + seconds
        users = (
            user(
                client, material, policy, until, random.Random(chance.random()), options.pause,
                options.tokens, into,
            )
            for _ in range(options.users)
        )  # fmt: skip
        await asyncio.gather(*users)

    try:
        await one_block(UNAUDITED, min(10.0, block), warm)
        for number in range(options.blocks):
            # ABBA, so that a machine that grows slower favours neither.
            policy = (AUDITED, UNAUDITED, UNAUDITED, AUDITED)[number % 4]
            await one_block(policy, block, found)
            print(f"block {number + 1}/{options.blocks}: {policy}", flush=True)
        audits = await _audits(client)
    finally:
        await client.close()
    return {**summarise(found), "audits": audits, "users": options.users, "pause": options.pause}


def summarise(found: list[tuple[str, list[float]]]) -> dict[str, Any]:
    rng = random.Random(0)
    by_policy: dict[str, list[list[float]]] = defaultdict(list)
    for policy, times in found:
        by_policy[policy].append(times)

    def ratio(sessions: dict[str, list[list[float]]], turns: slice) -> float:
        on, off = (
            median(t for times in sessions[policy] for t in times[turns])
            for policy in (AUDITED, UNAUDITED)
        )
        return on / off

    result: dict[str, Any] = {}
    for name, turns in (("all_turns", slice(None)), ("turns_after_the_switch", slice(2, None))):
        draws = sorted(
            ratio({p: rng.choices(s, k=len(s)) for p, s in by_policy.items()}, turns)
            for _ in range(_DRAWS)
        )
        result[name] = {
            "ratio": ratio(by_policy, turns),
            "interval": [draws[int(0.025 * _DRAWS)], draws[int(0.975 * _DRAWS)]],
            **{
                policy: {
                    "median_seconds": median(t for times in sessions for t in times[turns]),
                    "turns": sum(len(times[turns]) for times in sessions),
                }
                for policy, sessions in by_policy.items()
            },
        }
    return result


async def _audits(client: Client) -> dict[str, float]:
    text = (await client.http.get(f"{client.gateway}/metrics")).text
    counts: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line.startswith("baton_audits_total{"):
            labels, value = line.rsplit(" ", 1)
            counts[labels.split('outcome="')[1].split('"')[0]] += float(value)
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between turns")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--passages", type=Path, help='.jsonl of {"story", "turns": [{"question"}]}'
    )
    parser.add_argument("--out", type=Path, default=Path("build/drift"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with real_stack(SETTINGS, {AUDITED: _PLAIN, UNAUDITED: _PLAIN}) as stack:
        report = asyncio.run(run(stack, options))
    (options.out / "ttft.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
