"""Start on the small tier, escalate at one turn number and come back down at another."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from policies.base import Decision, Economics, Kv, Policy, SessionView, Turn


class Turns(Policy):
    kind: Literal["turns"] = "turns"
    escalate_at: int = Field(default=3, ge=1)
    downgrade_at: int | None = Field(default=None, ge=2)
    kv: Kv = "map"

    @model_validator(mode="after")
    def _down_after_up(self) -> Self:
        if self.downgrade_at is not None and self.downgrade_at <= self.escalate_at:
            raise ValueError("downgrade_at must be greater than escalate_at")
        return self

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision:
        if self.downgrade_at is not None and turn.number >= self.downgrade_at:
            tier, reason = "small", "turns_downgraded"
        elif turn.number >= self.escalate_at:
            tier, reason = "large", "turns_escalated"
        else:
            tier, reason = "small", "turns_initial"
        return Decision(tier=tier, stage="turns", reason=reason, kv=self.kv)
