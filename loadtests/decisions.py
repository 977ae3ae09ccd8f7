"""How long a decision takes, classifier included.

    python -m loadtests.decisions --policy balanced

Ordinary prompts of several lengths, in sessions of every kind, on one core; prints
microseconds at the median and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median, quantiles

import policies
from policies import Economics, Memory, Policy, SessionView, TierEconomics, Turn
from policies.features import BUCKETS
from router.offline.cli import preset

TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who will"
)
WORDS = TEXT.split()
LENGTHS = {"short": 12, "ordinary": 80, "long": 600}


def measure(policy: Policy, count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Microseconds a decision by length of the prompt."""
    rng = random.Random(seed)
    found = {}
    for name, words in LENGTHS.items():
        times = []
        for _ in range(count):
            arguments = _inputs(rng, words)
            started = time.perf_counter_ns()
            policy.decide(*arguments)
            times.append((time.perf_counter_ns() - started) / 1000)
        found[name] = {"median": median(times), "p99": quantiles(times, n=100)[-1]}
    return found


def full_classifier(seed: int = 0) -> dict:
    """A classifier with a weight in every bucket: the most that a trained one can have."""
    rng = random.Random(seed)
    weights = {f"h{bucket}": rng.gauss(0, 1) for bucket in range(BUCKETS)}
    return {"bias": 0.1, "weights": {**weights, "chars": 0.2, "question": -0.1}}


def _inputs(rng: random.Random, words: int) -> tuple[Turn, SessionView, Economics]:
    text = " ".join(rng.choice(WORDS) for _ in range(words)) + "?"
    prompt = rng.randint(len(text), 20_000)
    number = rng.randint(1, 40)
    tier = rng.choice(["small", "large"])
    live = {
        tier: TierEconomics(
            prompt_price=1, completion_price=3, uncached_tokens=prompt // 4, prefill_seconds=1.0,
            decode_token_seconds=0.05, mapped_share=0.9, map_seconds=0.3, context_tokens=32768,
        )
        for tier in ("small", "large")
    }  # fmt: skip
    session = SessionView(
        id=str(rng.random()), turns=number - 1, tier=tier, stay=3, switches_up=1, memory=Memory()
    )
    turn = Turn(number=number, messages=2 * number, prompt_chars=prompt, text=text)
    return turn, session, Economics(tiers=live)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", default="balanced", help="a preset's name or a file")
    parser.add_argument("--count", type=int, default=2000, help="decisions of each length")
    arguments = parser.parse_args()
    path = Path(arguments.policy)
    policy = policies.from_file(path if path.exists() else preset(arguments.policy))
    if policy.kind == "adaptive" and policy.classifier is not None:
        data = policy.model_dump(by_alias=True)
        data["classifier"]["model"] = full_classifier()
        policy = policies.from_dict(data)
    print(json.dumps(measure(policy, arguments.count), indent=1))


if __name__ == "__main__":
    main()
