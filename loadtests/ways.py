"""The ways to route that the switch benchmark compares: one policy each, with one knob."""

from __future__ import annotations

from typing import Any

import numpy as np

import policies
from policies import Policy
from router.offline.costmodel import CostModel
from router.offline.tune import Score

# What right answers are worth, in the currency of the prices: the knob of the switch term.
VALUES = tuple(np.geomspace(0.0008, 0.3, 12).tolist())
# The knob of the others is the gain above which a turn goes to large: these quantiles of
# the gains that the scores expect, so that it reaches from nearly none to nearly all.
QUANTILES = tuple(np.linspace(0.02, 0.98, 12).tolist())
WITH_TERM = "switch economics"
NO_TERM = "same, without the switch term"
NO_MAP = "same, without the switch term, no map"
SMALL_FIRST = "small first, escalates without a map"
LARGE, SMALL = "always large", "always small"
# Beside what all have; "knob" stands for the setting tried.
WAYS: dict[str, dict[str, Any]] = {
    WITH_TERM: {"switching": {"value": "knob"}},
    NO_TERM: {"threshold": "knob"},
    NO_MAP: {"threshold": "knob", "kv": {"default": "native"}},
    # Large is never begun with: every turn is small's until its own answer is doubtful.
    SMALL_FIRST: {"threshold": 1, "kv": {"default": "native"}},
}
PINNED: dict[str, Policy] = {
    tier: policies.from_dict({"kind": "pinned", "tier": tier.split()[1]}) for tier in (LARGE, SMALL)
}


def settings(name: str, scores: dict[str, Score]) -> list[float]:
    if name == WITH_TERM:
        return list(VALUES)
    gains = [scores["cascade"].calibrate]
    if name != SMALL_FIRST:
        gains.append(scores["classifier"].calibrate)
    return np.quantile(np.concatenate(gains), QUANTILES).tolist()


def policy(
    name: str, knob: float, scores: dict[str, Score], costs: CostModel, right: float
) -> Policy:
    """One of WAYS at one setting. `right` is the large model's share of right answers."""
    way = WAYS[name]
    data: dict[str, Any] = {
        "kind": "adaptive",
        "cascade": {"score": scores["cascade"].model.model_dump(), "threshold": -1},
        "stability": {"min_stay": 1, "latch_after": None},
        "kv": {"by_task": {"math": "native", "quote": "native"}, **way.get("kv", {})},
    }
    if "switching" in way:
        data["switching"] = {
            "value": knob,
            "second_price": costs.second_price,
            "answer_tokens": 60,
            "answer_quality": right,
            **{tier: _speeds(costs, tier) for tier in ("small", "large")},
        }
    else:
        data["cascade"]["threshold"] = knob
        data["threshold"] = knob if way["threshold"] == "knob" else way["threshold"]
    return policies.from_dict(data)


def _speeds(costs: CostModel, tier: str) -> dict[str, float]:
    """For what the replay does not tell the policy: it tells all of it."""
    model = costs.tier(tier)
    return {
        "prompt_price": model.prompt_price,
        "completion_price": model.completion_price,
        "prefill_tokens_per_second": 1 / model.prefill_token_seconds,
        "decode_tokens_per_second": 1 / model.decode_token_seconds,
    }
