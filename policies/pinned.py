"""Every turn goes to one tier."""

from __future__ import annotations

from typing import Literal

from policies.base import Decision, Economics, Kv, Policy, SessionView, Tier, Turn


class Pinned(Policy):
    kind: Literal["pinned"] = "pinned"
    tier: Tier = "small"
    kv: Kv = "map"

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision:
        return Decision(tier=self.tier, stage="pinned", reason="pinned", kv=self.kv)
