"""What a policy sees and what it answers."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

Tier = Literal["small", "large"]
# How a policy wants a change of model to be answered: from mapped KV, by native
# prefill, or mapped with a longer native tail.
Kv = Literal["map", "native", "hybrid"]
# Stages and reasons become metric labels, so they are short code words, never free text.
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(Frozen):
    """The request at hand. `text` is the last user message; it must not be logged."""

    number: int = Field(ge=1)
    messages: int = Field(ge=0)
    prompt_chars: int = Field(ge=0)
    has_tools: bool = False
    has_schema: bool = False
    text: str = Field(default="", repr=False)


class SessionView(Frozen):
    """What earlier turns left behind. A new conversation has the defaults."""

    turns: int = Field(default=0, ge=0)
    tier: Tier | None = None
    switches_up: int = Field(default=0, ge=0)
    switches_down: int = Field(default=0, ge=0)
    lossy: bool = False
    mapped_tokens: int = Field(default=0, ge=0)
    drift: float = 0.0


class TierEconomics(Frozen):
    available: bool = True
    in_flight: int = Field(default=0, ge=0)
    queued: int = Field(default=0, ge=0)


class Economics(Frozen):
    """The fleet as it is now, by tier."""

    tiers: dict[Tier, TierEconomics] = Field(default_factory=dict)


class Decision(Frozen):
    tier: Tier
    stage: Word
    reason: Word
    kv: Kv = "map"


class Policy(Protocol):
    """`decide` is pure: the same arguments give the same decision, with no I/O.

    `fail_open` names the tier that answers when the chosen one has no worker left
    ("none": such a turn fails).
    """

    kind: str
    fail_open: Literal["small", "large", "none"]

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision: ...
