"""Turns with both models' outcomes, made so that there is something to learn."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def items(count: int = 600, seed: int = 1) -> list[dict[str, Any]]:
    """Turns of which the words tell hard from easy, and the signals right from wrong."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        hard = rng.random() < 0.4
        words = [rng.choice(WORDS[:6] if hard else WORDS[4:]) for _ in range(rng.randint(5, 30))]
        small, large = float(rng.random() < (0.2 if hard else 0.85)), float(rng.random() < 0.85)
        doubt = rng.gammavariate(2, 0.4) + (1 - small) * rng.random() * 2
        made.append(
            {
                "id": f"t{number}",
                "session": f"s{number // 3}",
                "task": f"task{number % 2}",
                "text": " ".join(words),
                "signals": {"tokens": 5, "low_logprob": -2 * doubt, "mean_logprob": -doubt},
                "prompt_logprob": -rng.random(),
                "small": {"quality": small},
                "large": {"quality": large},
            }
        )
    return made
