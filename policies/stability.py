"""Against ping-pong: minimum stay, hysteresis, a latch on the large tier, decay by idleness."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from policies.base import Frozen, Memory, SessionView, Tier

# How far the gain moves from one turn to the next, about; in `likely`.
_STEP = 0.1


class Wish(NamedTuple):
    """The tier that a turn gets, why, and what to remember of it."""

    tier: Tier
    reason: str
    memory: Memory
    # Whether a change of tier is open to this turn at all.
    free: bool


class Stability(Frozen):
    # Turns that a session stays after a switch before the policy may switch it again.
    min_stay: int = Field(default=2, ge=1)
    # Gain beyond the bar, either way, that a switch takes.
    hysteresis: float = Field(default=0.0, ge=0, le=1)
    # So many turns in a row that wanted the large tier keep the session there.
    latch_after: int | None = Field(default=2, ge=1)
    # A pause after which stay and latch are forgotten: the workers' caches are as well.
    idle_seconds: float = Field(default=900.0, gt=0)

    def settle(self, gain: float, bar: float, session: SessionView) -> Wish:
        """From the expected gain of the large tier, and the bar at which it pays."""
        idle = session.idle_seconds >= self.idle_seconds
        margin = {None: 0.0, "small": self.hysteresis, "large": -self.hysteresis}[session.tier]
        wants_large = gain > bar + margin
        memory = self._remember(session, wants_large)
        want: Tier = "large" if wants_large or memory.latched else "small"
        free = self._free(session, idle)
        if session.tier is not None and want != session.tier and not free:
            return Wish(session.tier, "min_stay", memory, free)
        if want == "large" and not wants_large:
            return Wish("large", "latched", memory, free)
        return Wish(want, "gain_above_bar" if wants_large else "gain_below_bar", memory, free)

    def escalated(self, session: SessionView) -> Memory:
        """What to remember of a turn that a cascade sends to the large tier."""
        return self._remember(session, wants_large=True)

    def likely(self, gain: float, bar: float, session: SessionView) -> float:
        """How likely the session's next turn is to want the large tier, after this one on small.

        A guess from this turn's distance to the bar, as hard turns come in runs; rising with
        it and between 0 and 1, but not calibrated. 0 when the next turn may not switch.
        """
        stay = session.stay + 1 if session.tier == "small" else 1
        switched = session.switches_up + session.switches_down + (session.tier == "large") > 0
        if switched and stay < self.min_stay:
            return 0.0
        return 1 / (1 + math.exp(min(700.0, (bar + self.hysteresis - gain) / _STEP)))

    def _remember(self, session: SessionView, wants_large: bool) -> Memory:
        idle = session.idle_seconds >= self.idle_seconds
        before = Memory() if idle else session.memory
        wishes = before.wishes + 1 if wants_large else 0
        confirmed = self.latch_after is not None and wishes >= self.latch_after
        return Memory(wishes=wishes, latched=before.latched or confirmed)

    def _free(self, session: SessionView, idle: bool) -> bool:
        switched = session.switches_up + session.switches_down > 0
        return idle or not switched or session.stay >= self.min_stay
