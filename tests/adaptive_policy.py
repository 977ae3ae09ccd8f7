"""An adaptive policy with round figures, and a turn for it to decide: what tests of its parts share."""

from __future__ import annotations

import policies
from policies import Economics, SessionView, Turn

SMALL = {
    "prompt_price": 0.1,
    "completion_price": 0.2,
    "prefill_tokens_per_second": 560,
    "decode_tokens_per_second": 15,
}
LARGE = {
    "prompt_price": 1,
    "completion_price": 2,
    "prefill_tokens_per_second": 400,
    "decode_tokens_per_second": 12,
}
SWITCHING = {"value": 0.02, "second_price": 0.001, "small": SMALL, "large": LARGE}
HARD, EASY = "What is 17 * 23?", "Tell me about penguins."


def adaptive(**sections):
    return policies.from_dict(
        {"kind": "adaptive", "gain": {"math": 0.5}, "threshold": 0.2, **sections}
    )


def turn(text=EASY, **fields):
    return Turn(**{"number": 1, "messages": 1, "prompt_chars": len(text), "text": text, **fields})


def decide(policy, text=EASY, session=None, economics=None, **fields):
    return policy.decide(turn(text, **fields), session or SessionView(), economics or Economics())
