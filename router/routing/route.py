"""A turn's decision: its policy found, told what there is to know, and asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from policies import Decision, Economics, Policy, SessionView, Spent, Turn
from router.budgets.base import seconds_left
from router.errors import ApiError
from router.metrics import Metrics
from router.routing import facts
from router.routing.catalog import Catalog
from router.routing.economics import Fleet
from router.routing.length import PromptLength
from router.settings import Tier
from router.turns.incoming import Subject

_REFUSALS = {
    "budget_session_money": "This session's budget is used up.",
    "budget_session_large_tokens": "This session's budget of large-model tokens is used up.",
    "budget_tenant_money": "Today's budget is used up.",
    "budget_tenant_large_tokens": "Today's budget of large-model tokens is used up.",
}


@dataclass(frozen=True)
class Routed:
    """A decision, and everything that went into it."""

    name: str
    policy: Policy
    decision: Decision
    turn: Turn
    session: SessionView
    economics: Economics

    def inputs(self) -> dict[str, Any]:
        """Without the users' words."""
        return {
            "turn": self.turn.model_dump(exclude={"text", "earlier"}, exclude_defaults=True),
            "session": self.session.model_dump(exclude_defaults=True),
            "economics": self.economics.model_dump(exclude_none=True),
        }


class Route:
    def __init__(self, catalog: Catalog, fleet: Fleet, metrics: Metrics) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._metrics = metrics
        self.length = PromptLength()

    def policy(self, name: str) -> Policy:
        policy = self._catalog.get(name)
        if policy is None:
            raise ApiError(400, "There is no policy of that name.", param="x-baton-policy")
        return policy

    def decide(
        self,
        subject: Subject,
        name: str,
        policy: Policy,
        forced: tuple[Tier, str] | None,
        tenant_spent: Spent,
        prompt_logprob: float | None = None,
    ) -> Routed:
        started = time.perf_counter()
        tier = forced[0] if forced else None
        tokens = self.length.estimate(subject.incoming, subject.session)
        turn = facts.turn(subject, tier, tokens, prompt_logprob)
        view = facts.view(subject, tenant_spent)
        economics = self._fleet.economics(subject, tokens)
        decision = policy.decide(turn, view, economics)
        if forced is not None:
            decision = _obey(decision, *forced)
        self._metrics.decide_seconds.labels(name).observe(time.perf_counter() - started)
        self._count(name, decision)
        return Routed(name, policy, decision, turn, view, economics)

    def _count(self, name: str, decision: Decision) -> None:
        reason = self._metrics.bounded_decision(decision.reason)
        arm = decision.arm or "none"
        self._metrics.decisions.labels(name, arm, decision.tier, decision.stage, reason).inc()
        if decision.shadow is not None:
            self._metrics.shadow.labels(name, decision.tier, decision.shadow.tier).inc()


def refusal(decision: Decision, headers: dict[str, str]) -> ApiError:
    """What a policy that will not have the turn answered wants its client to see."""
    rejection = decision.rejection
    # The client's library shall not try again by itself: nothing changes until the budget does.
    headers = {"x-should-retry": "false", "x-baton-reason": decision.reason, **headers}
    if rejection.status == 429 and rejection.code.startswith("budget_tenant"):
        headers["retry-after"] = str(seconds_left())
    return ApiError(
        rejection.status,
        _REFUSALS.get(rejection.code, "The routing policy refuses this turn."),
        code=rejection.code,
        type="insufficient_quota",
        headers=headers,
    )


def _obey(decision: Decision, tier: Tier, how: str) -> Decision:
    """A tier that was asked for goes before the policy, but not before its budgets."""
    if decision.rejection is not None or decision.stage == "budget":
        return decision
    same = decision.stage == "forced"
    return decision.model_copy(
        update={
            "tier": tier,
            "stage": "forced",
            "reason": f"forced_by_{how}",
            "kv": decision.kv if same else "map",
            "cascade": None,
        }
    )
