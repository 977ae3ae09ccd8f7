"""A decision in words for the log and for the client that asks: numbers and code words only."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from policies import Decision, Spent
from router.routing.route import Routed
from router.turns.incoming import Subject
from router.turns.leg import Leg


def header(routed: Routed, decision: Decision) -> str:
    """One line of ASCII JSON: the decision that was carried out, and what went into it."""
    said = decision.model_dump(
        exclude={"memory": True, "escalated_memory": True, "cascade": {"score"}},
        exclude_none=True,
    )
    explained = {
        "policy": routed.name,
        "version": routed.policy.version,
        "decision": said,
        "inputs": routed.inputs(),
    }
    return json.dumps(explained, separators=(",", ":"))


def entry(
    subject: Subject, routed: Routed, decision: Decision, legs: Sequence[Leg], spent: Spent
) -> dict[str, Any]:
    """A decision's line in the log."""
    tiers, shadow = routed.economics.tiers, routed.decision.shadow
    usage = legs[-1].usage if legs else None
    large = tiers.get("large")
    fields: dict[str, Any] = {
        "time": round(time.time(), 3),
        "request_id": subject.incoming.request_id,
        "session": subject.identity.id,
        "turn": routed.turn.number,
        "tenant": subject.incoming.tenant,
        "policy": routed.name,
        "version": routed.policy.version,
        "tier": decision.tier,
        "stage": decision.stage,
        "reason": decision.reason,
        "kv": decision.kv,
        "task": decision.task,
        "arm": decision.arm,
        "scores": decision.scores,
        "uncached": {tier: one.uncached_tokens for tier, one in tiers.items()},
        "mapped_share": large.mapped_share if large is not None else None,
        "prompt_tokens": usage.prompt_tokens if usage else routed.turn.prompt_tokens,
        "completion_tokens": usage.completion_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
        "money": spent.money,
        "seconds": round(time.monotonic() - subject.incoming.received, 4),
        "answered": usage is not None,
    }
    if shadow is not None:
        fields["shadow"] = {"tier": shadow.tier, "stage": shadow.stage, "reason": shadow.reason}
    if decision.rejection is not None:
        fields["rejection"] = decision.rejection.code
    if len(legs) > 1:
        taken_back = legs[0].usage
        fields["taken_back"] = {
            "tier": legs[0].tier,
            "kv_status": legs[0].outcome.status,
            "prompt_tokens": taken_back.prompt_tokens if taken_back else None,
            "completion_tokens": taken_back.completion_tokens if taken_back else None,
            "cached_tokens": taken_back.cached_tokens if taken_back else None,
        }
    return fields
