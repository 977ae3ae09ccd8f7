"""The cascade: the small tier answers first, and its own confidence says whether that will do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policies.files import Model

if TYPE_CHECKING:
    from policies.base import Decision

SIGNALS = ("low_logprob", "mean_logprob", "margin", "tokens", "self_check")
# What a learned score may read beside them: the gain that was expected before the answer.
PRIOR = "prior"
Signal = Literal["low_logprob", "mean_logprob", "margin", "tokens", "self_check"]


class Signals(BaseModel):
    """What the small tier's answer, or its first tokens, say about it.

    `low_logprob` is a low quantile and `mean_logprob` the mean of its tokens'
    log-probabilities (nats); `margin` is the mean distance to the second likeliest token
    (nats); `self_check` is the probability that the model itself gives to its being right.
    None is "not measured".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(ge=0)
    low_logprob: float | None = None
    mean_logprob: float | None = None
    margin: float | None = None
    self_check: float | None = Field(default=None, ge=0, le=1)


class Verdict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    escalate: bool
    # "low_logprob", "margin", "score", ... or "confident".
    reason: str
    # Quality expected of the large tier less that of this answer, where a score is set.
    gain: float | None = None


class Cascade(BaseModel):
    """How the router runs the small tier's answer, and the judgement on it.

    `buffer` holds the whole answer back until it is judged; `early` holds back and judges
    the first `tokens` tokens only. An answer that ends before is judged whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["buffer", "early"] = "early"
    tokens: int = Field(default=16, ge=1, le=512)
    quantile: float = Field(default=0.1, ge=0, le=1)
    # Ask the small tier whether its answer is right (buffer only; costs a request).
    self_check: bool = False
    # Escalate when a signal is below, or above, its bound.
    below: dict[Signal, float] = Field(default_factory=dict)
    above: dict[Signal, float] = Field(default_factory=dict)
    # Learned by `baton tune`: expected gain from the signals; escalate above `threshold`.
    # A JSON file beside the policy, or the model itself.
    score: Model | None = None
    threshold: float = Field(default=0.0, ge=-1, le=1)
    # The classifier's gain for the turn at hand; set by the policy, not in files.
    prior: float | None = Field(default=None, ge=-1, le=1)
    # How the large tier gets the prompt's KV when the judgement is to escalate.
    kv: Literal["map", "native", "hybrid"] = "map"

    @model_validator(mode="after")
    def _judges_something(self) -> Self:
        if not self.below and not self.above and self.score is None:
            raise ValueError("set at least one of below, above and score")
        if self.self_check and self.mode == "early":
            raise ValueError("self_check needs mode: buffer, since it judges a whole answer")
        if self.score is not None and (unknown := set(self.score.weights) - {*SIGNALS, PRIOR}):
            raise ValueError(
                f"score.weights: {', '.join(sorted(unknown))}: allowed are {', '.join((*SIGNALS, PRIOR))}"
            )
        return self

    def judge(self, signals: Signals) -> Verdict:
        """Pure: the same signals give the same verdict. An unmeasured signal never escalates."""
        values = {name: getattr(signals, name) for name in SIGNALS}
        gain = None
        measured = score_features(values, self.prior)
        if self.score is not None and any(name in self.score.weights for name in measured):
            gain = self.score.gain(measured)
        for bounds, sign in ((self.below, 1), (self.above, -1)):
            for name, bound in bounds.items():
                if values[name] is not None and sign * (bound - values[name]) > 0:
                    return Verdict(escalate=True, reason=name, gain=gain)
        if gain is not None and gain > self.threshold:
            return Verdict(escalate=True, reason="score", gain=gain)
        return Verdict(escalate=False, reason="confident", gain=gain)


def score_features(values: Mapping[str, float | None], prior: float | None) -> dict[str, float]:
    """What a learned score reads: the measured signals, lengths and margins as logarithms."""
    found = {name: value for name, value in values.items() if value is not None}
    for name in ("tokens", "margin"):
        if name in found:
            found[name] = math.log1p(max(0.0, found[name]))
    if found and prior is not None:
        found[PRIOR] = prior
    return found


def signals(
    logprobs: Sequence[float],
    margins: Sequence[float],
    quantile: float,
    self_check: float | None = None,
) -> Signals:
    """Signals of an answer's tokens; both sequences may be empty (nothing measured)."""
    ordered = sorted(logprobs)
    return Signals(
        tokens=len(logprobs),
        low_logprob=ordered[int(quantile * (len(ordered) - 1))] if ordered else None,
        mean_logprob=sum(ordered) / len(ordered) if ordered else None,
        margin=sum(margins) / len(margins) if margins else None,
        self_check=self_check,
    )


def escalate(decision: Decision, verdict: Verdict) -> Decision:
    """The decision once the small tier's answer was judged not to do."""
    scores = dict(decision.scores)
    if verdict.gain is not None:
        scores["cascade_gain"] = verdict.gain
    return decision.model_copy(
        update={
            "tier": "large",
            "stage": "cascade",
            "reason": f"cascade_{verdict.reason}",
            "kv": decision.cascade.kv,
            "cascade": None,
            "memory": decision.escalated_memory or decision.memory,
            "escalated_memory": None,
            "scores": scores,
        }
    )
