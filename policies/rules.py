"""Hard rules: what no score may overrule."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from policies.base import Economics, Frozen, Rejection, SessionView, Spent, Tier, Turn, other
from policies.costs import prompt_tokens


class Ruling(NamedTuple):
    tier: Tier
    stage: str
    reason: str
    rejection: Rejection | None = None


class Limit(Frozen):
    money: float | None = Field(default=None, ge=0)
    # Tokens that the large tier has read and written.
    large_tokens: int | None = Field(default=None, ge=0)

    def reached(self, spent: Spent) -> str | None:
        if self.money is not None and spent.money >= self.money:
            return "money"
        if self.large_tokens is not None and spent.large_tokens >= self.large_tokens:
            return "large_tokens"
        return None


class Budgets(Frozen):
    """At a limit turns go to the small tier (`degrade`) or are refused (`reject`)."""

    session: Limit = Limit()
    # A tenant's spending of one UTC day.
    tenant: Limit = Limit()
    at_limit: Literal["degrade", "reject"] = "degrade"
    status: Literal[402, 429] = 402

    def rule(self, session: SessionView) -> Ruling | None:
        for who, limit, spent in (
            ("session", self.session, session.spent),
            ("tenant", self.tenant, session.tenant_spent),
        ):
            if what := limit.reached(spent):
                reason = f"budget_{who}_{what}"
                rejection = None
                if self.at_limit == "reject":
                    rejection = Rejection(status=self.status, code=reason)
                return Ruling("small", "budget", reason, rejection)
        return None


class Rules(Frozen):
    # Where turns with tools, or with a response format, go; null is no rule.
    tools: Tier | None = None
    schema_: Tier | None = Field(default=None, alias="schema")
    # The model that called a tool reads the tool's result.
    pin_tool_loops: bool = True
    # Room kept for the answer of a request that does not say how long it may be.
    answer_room: int = Field(default=512, ge=1)
    # No turn is escalated while so many wait for the large tier.
    max_queued: int | None = Field(default=None, ge=0)

    def rule(self, turn: Turn, session: SessionView, economics: Economics) -> Ruling | None:
        if turn.forced is not None:
            return Ruling(turn.forced, "forced", "forced")
        if not self._fits(turn, "small", economics) and self._fits(turn, "large", economics):
            return Ruling("large", "rules", "context_length")
        if self.pin_tool_loops and turn.tool_loop and session.tier is not None:
            return Ruling(session.tier, "rules", "tool_loop")
        if turn.has_tools and self.tools is not None:
            return Ruling(self.tools, "rules", "tools")
        if turn.has_schema and self.schema_ is not None:
            return Ruling(self.schema_, "rules", "schema")
        return None

    def barred(self, tier: Tier, session: SessionView, economics: Economics) -> str | None:
        """Why a tier that a score prefers cannot have the turn now, if so."""
        if not economics.available(tier) and economics.available(other(tier)):
            return f"{tier}_down"
        live = economics.tiers.get("large")
        escalates = tier == "large" and session.tier != "large"
        if escalates and self.max_queued is not None and live and live.queued > self.max_queued:
            return "large_busy"
        return None

    def _fits(self, turn: Turn, tier: Tier, economics: Economics) -> bool:
        live = economics.tiers.get(tier)
        if live is None or live.context_tokens is None:
            return True
        return prompt_tokens(turn) + (turn.max_tokens or self.answer_room) <= live.context_tokens
