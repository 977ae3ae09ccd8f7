"""Brings in a new policy beside the current one: in the shadow, for a share, or for tenants."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)

from policies.base import Decision, Economics, Policy, SessionView, Turn


def _part(value: Any, info: ValidationInfo) -> Policy:
    from policies.load import read_part

    return read_part(value, info)


Part = Annotated[
    SerializeAsAny[Policy],
    BeforeValidator(_part, json_schema_input_type=str | dict[str, Any]),
]


class Rollout(Policy):
    """`current` and `candidate` are policies, or names of files beside this one.

    shadow: the candidate decides as well and is logged; turns go as before.
    canary: sessions whose hash is among the first `percent` go by the candidate.
    ab: sessions of `tenants` go by the candidate.
    """

    kind: Literal["rollout"] = "rollout"
    mode: Literal["shadow", "canary", "ab"]
    current: Part
    candidate: Part
    percent: float | None = Field(default=None, ge=0, le=100)
    tenants: frozenset[str] = frozenset()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.mode == "canary") != (self.percent is not None):
            raise ValueError("mode canary, and only that, needs percent")
        if (self.mode == "ab") != bool(self.tenants):
            raise ValueError("mode ab, and only that, needs tenants")
        return self

    @property
    def needs_prompt_logprob(self) -> bool:
        return self.current.needs_prompt_logprob or self.candidate.needs_prompt_logprob

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision:
        arm = "candidate" if self._candidate_decides(turn, session) else "current"
        decision = getattr(self, arm).decide(turn, session, economics)
        shadow = None
        if self.mode == "shadow":
            shadow = self.candidate.decide(turn, session, economics)
        return decision.model_copy(update={"arm": arm, "shadow": shadow})

    def _candidate_decides(self, turn: Turn, session: SessionView) -> bool:
        if self.mode == "ab":
            return turn.tenant in self.tenants
        return self.mode == "canary" and share(session.id) * 100 < self.percent


def share(session_id: str) -> float:
    """Where a session lies in [0, 1): the same for all its turns and on every gateway."""
    return int.from_bytes(hashlib.sha256(session_id.encode()).digest()[:8]) / 2**64
