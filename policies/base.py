"""What a policy sees and what it answers."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.cascade import Cascade

Tier = Literal["small", "large"]
TIERS: tuple[Tier, ...] = ("small", "large")
# How a policy wants a change of model to be answered: from mapped KV, by native
# prefill, or mapped with a longer native tail.
Kv = Literal["map", "native", "hybrid"]
Task = Literal["math", "quote", "code", "chat"]
# Stages and reasons become metric labels, so they are short code words, never free text.
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]


def other(tier: Tier) -> Tier:
    return "small" if tier == "large" else "large"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(Frozen):
    """The request at hand. `text` and `earlier` are the user's words; they must not be logged."""

    number: int = Field(ge=1)
    messages: int = Field(ge=0)
    prompt_chars: int = Field(ge=0)
    # Counted by a worker where the router has the count, else None: four characters a token.
    prompt_tokens: int | None = Field(default=None, ge=0)
    # The most the answer may have, as far as the request says so.
    max_tokens: int | None = Field(default=None, ge=1)
    has_tools: bool = False
    has_schema: bool = False
    # The last message is a tool's result: the model that made the call goes on.
    tool_loop: bool = False
    # Asked for by header, alias or model name.
    forced: Tier | None = None
    tenant: str = ""
    # The last user message, and up to three user messages before it, newest first.
    text: str = Field(default="", repr=False)
    earlier: tuple[str, ...] = Field(default=(), repr=False)
    # Mean log-probability a token (nats) that the small model gives to `text`, if it was asked.
    prompt_logprob: float | None = None
    # Known beforehand, as in the replay of a log without prompts; else the policy finds them.
    task: Task | None = None
    gain: float | None = Field(default=None, ge=-1, le=1)


class Spent(Frozen):
    """Money, and tokens that the large tier read or wrote."""

    money: float = 0.0
    large_tokens: int = Field(default=0, ge=0)


class Memory(Frozen):
    """What a policy remembers of a session: a decision's `memory` comes back with the next turn."""

    # Turns in a row that wanted the large tier.
    wishes: int = Field(default=0, ge=0)
    # The large tier was confirmed: only a long pause ends its stay.
    latched: bool = False


class SessionView(Frozen):
    """What earlier turns left behind. A new conversation has the defaults."""

    id: str = ""
    turns: int = Field(default=0, ge=0)
    # Who answered last, and how many turns in a row it has answered.
    tier: Tier | None = None
    stay: int = Field(default=0, ge=0)
    switches_up: int = Field(default=0, ge=0)
    switches_down: int = Field(default=0, ge=0)
    idle_seconds: float = Field(default=0.0, ge=0)
    lossy: bool = False
    mapped_tokens: int = Field(default=0, ge=0)
    # Accumulated since the cache was exact, in nats per token.
    drift: float = 0.0
    # The session's own, and its tenant's on this UTC day.
    spent: Spent = Spent()
    tenant_spent: Spent = Spent()
    memory: Memory = Memory()


class TierEconomics(Frozen):
    """One tier, for the turn at hand. What is None comes from the policy's own `costs`."""

    available: bool = True
    in_flight: int = Field(default=0, ge=0)
    queued: int = Field(default=0, ge=0)
    context_tokens: int | None = Field(default=None, ge=1)
    # Money per million tokens.
    prompt_price: float | None = Field(default=None, ge=0)
    cached_price: float | None = Field(default=None, ge=0)
    completion_price: float | None = Field(default=None, ge=0)
    # Prompt tokens that this tier does not have exact or continued KV for, and the
    # predicted seconds to prefill them natively.
    uncached_tokens: int | None = Field(default=None, ge=0)
    # What it has of the session is mapped KV, or computed on top of it.
    lossy: bool = False
    prefill_seconds: float | None = Field(default=None, ge=0)
    decode_token_seconds: float | None = Field(default=None, ge=0)
    # Were the session to change to this tier: the share of `uncached_tokens` that mapped
    # KV would take over, and the predicted seconds of the transfer.
    mapped_share: float | None = Field(default=None, ge=0, le=1)
    map_seconds: float | None = Field(default=None, ge=0)
    # Share of the quality of native prefill that mapped KV keeps, by task class: the
    # artifact's quality card for the direction into this tier.
    retention: dict[Task, float] = Field(default_factory=dict)


class Economics(Frozen):
    """The fleet as it is now, by tier."""

    tiers: dict[Tier, TierEconomics] = Field(default_factory=dict)

    def available(self, tier: Tier) -> bool:
        """A tier that nothing is known of counts as there."""
        return tier not in self.tiers or self.tiers[tier].available


class Rejection(Frozen):
    """The turn is not to be answered: HTTP status and the error's code."""

    status: Literal[402, 429]
    code: Word


class Decision(Frozen):
    """The answer to one turn.

    `kv` "native" for a session that stays on its model and is lossy asks for an answer in
    the exact namespace: the session is re-anchored. With `rejection` nothing is answered.
    With `cascade` the small tier answers first and `cascade.judge` says whether the large
    one answers instead; the decision is then `escalate(decision, verdict)`.
    `memory` is kept with the session and is part of the next turn's SessionView;
    `escalated_memory` takes its place when a cascade escalates.
    """

    tier: Tier
    stage: Word
    reason: Word
    kv: Kv = "map"
    task: Task | None = None
    cascade: Cascade | None = None
    rejection: Rejection | None = None
    memory: Memory = Memory()
    escalated_memory: Memory | None = None
    # Inputs and intermediate results as numbers, for the log and for x-baton-explain.
    scores: dict[Word, float] = Field(default_factory=dict)
    # In a rollout: which of the policies decided, and what the other one would have done.
    arm: Word | None = None
    shadow: Decision | None = None


class Probe(Frozen):
    """A regression test inside a policy's file: what it must decide for one prompt."""

    text: str
    tier: Tier | None = None
    kv: Kv | None = None
    reason: Word | None = None
    task: Task | None = None
    # Fields of Turn, SessionView and Economics other than their defaults.
    turn: dict[str, Any] = Field(default_factory=dict)
    session: dict[str, Any] = Field(default_factory=dict)
    economics: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        try:
            self.inputs()
        except ValidationError as error:
            faults = (f"{item['loc'][0]}: {item['msg']}" for item in error.errors())
            raise ValueError(f"{error.title}: {'; '.join(faults)}") from None
        return self

    def inputs(self) -> tuple[Turn, SessionView, Economics]:
        turn = {"number": 1, "messages": 1, "prompt_chars": len(self.text), "text": self.text}
        return (
            Turn.model_validate(turn | self.turn),
            SessionView.model_validate(self.session),
            Economics.model_validate(self.economics),
        )


class Policy(Frozen):
    """`decide` is pure: the same arguments give the same decision, with no I/O.

    `fail_open` names the tier that answers when the chosen one has no worker left
    ("none": such a turn fails).
    """

    kind: str
    fail_open: Literal["small", "large", "none"] = "large"
    probes: tuple[Probe, ...] = ()

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision:
        """Where the turn goes and why; each kind of policy has its own."""
        raise NotImplementedError

    @property
    def needs_prompt_logprob(self) -> bool:
        """Whether Turn.prompt_logprob makes a difference: getting it costs a request."""
        return False

    @cached_property
    def version(self) -> str:
        """Twelve hex digits that change with anything in the policy, for the decision log."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
