"""The policy that weighs quality against money and time, put together from its parts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from policies.base import (
    Decision,
    Economics,
    Frozen,
    Kv,
    Policy,
    SessionView,
    Task,
    Tier,
    TierEconomics,
    Turn,
    other,
)
from policies.cascade import Cascade
from policies.costs import Switching, Weighed
from policies.features import features
from policies.files import Model
from policies.kv import KvChoice
from policies.rules import Budgets, Rules
from policies.stability import Stability, Wish
from policies.tasks import task_class

Gain = Annotated[float, Field(ge=-1, le=1)]


class Classifier(Frozen):
    """Expected gain of the large tier, from the turn alone; trained by `baton tune`."""

    # A JSON file beside the policy, or the model itself.
    model: Model

    def gain(self, turn: Turn) -> float:
        return self.model.gain(features(turn))


class Adaptive(Policy):
    """Hard rules, then gain against bar, steadied; then the KV; then a cascade on small.

    The gain is the classifier's, else `gain` by task class. The bar is the higher one of
    `threshold` and, with `switching`, the gain at which the large tier pays.
    """

    kind: Literal["adaptive"] = "adaptive"
    rules: Rules = Rules()
    budgets: Budgets | None = None
    classifier: Classifier | None = None
    gain: dict[Task, Gain] = Field(default_factory=dict)
    threshold: Gain | None = None
    switching: Switching | None = None
    stability: Stability = Stability()
    kv: KvChoice = KvChoice()
    cascade: Cascade | None = None

    @model_validator(mode="after")
    def _has_a_bar(self) -> Self:
        if self.threshold is None and self.switching is None:
            raise ValueError("set threshold, switching or both: what the gain is compared with")
        return self

    @property
    def needs_prompt_logprob(self) -> bool:
        return self.classifier is not None and "prompt_logprob" in self.classifier.model.weights

    def decide(self, turn: Turn, session: SessionView, economics: Economics) -> Decision:
        task = task_class(turn)
        ruling = self.budgets.rule(session) if self.budgets is not None else None
        ruling = ruling or self.rules.rule(turn, session, economics)
        if ruling is not None:
            return Decision(
                tier=ruling.tier,
                stage=ruling.stage,
                reason=ruling.reason,
                rejection=ruling.rejection,
                kv=self._kv(ruling.tier, task, session, economics),
                task=task,
                memory=session.memory,
            )
        # Found once: the classifier's features have it too.
        gain = self._gain(turn.model_copy(update={"task": task}), task)
        weighed = None
        if self.switching is not None:
            weighed = self.switching.weigh(turn, session, economics, task, self.kv)
        bar = self._bar(weighed)
        wish = self.stability.settle(gain, bar, session)
        tier, stage, reason = wish.tier, self._stage, wish.reason
        if reason in ("min_stay", "latched"):
            stage = "stability"
        if barred := self.rules.barred(tier, session, economics):
            tier, stage, reason = other(tier), "rules", barred
        judged = tier == "small" and barred is None and self._may_escalate(wish, session, economics)
        return Decision(
            tier=tier,
            stage=stage,
            reason=reason,
            kv=weighed.kv[tier] if weighed else self._kv(tier, task, session, economics),
            task=task,
            cascade=self._cascade(gain, weighed, turn, task, session, economics)
            if judged
            else None,
            memory=wish.memory,
            escalated_memory=self.stability.escalated(session) if judged else None,
            scores={
                "gain": gain,
                "bar": bar,
                "stay": session.stay,
                "drift": session.drift,
                "wishes": wish.memory.wishes,
                "switch_probability": self.stability.likely(gain, bar, session),
                **(weighed.scores() if weighed else {}),
            },
        )

    @property
    def _stage(self) -> str:
        return "classifier" if self.classifier is not None else "gain"

    def _gain(self, turn: Turn, task: Task) -> float:
        if turn.gain is not None:
            return turn.gain
        if self.classifier is not None:
            return self.classifier.gain(turn)
        return self.gain.get(task, 0.0)

    def _bar(self, weighed: Weighed | None) -> float:
        bars = [self.threshold] if self.threshold is not None else []
        return max([*bars, weighed.bar] if weighed is not None else bars)

    def _kv(self, tier: Tier, task: Task, session: SessionView, economics: Economics) -> Kv:
        return self.kv.choose(task, session, economics.tiers.get(tier) or TierEconomics())[0]

    def _may_escalate(self, wish: Wish, session: SessionView, economics: Economics) -> bool:
        """A cascade ends on large: it is a switch unless the session is there already."""
        if self.cascade is None:
            return False
        if not wish.free and session.tier == "small":
            return False
        return self.rules.barred("large", session, economics) is None

    def _cascade(
        self,
        gain: float,
        weighed: Weighed | None,
        turn: Turn,
        task: Task,
        session: SessionView,
        economics: Economics,
    ) -> Cascade:
        threshold = self.cascade.threshold
        if weighed is not None:
            answered = 1.0
            if self.cascade.mode == "early":
                answered = min(1.0, self.cascade.tokens / self.switching.answer_length(turn))
            threshold = min(1.0, max(threshold, weighed.bar_after(answered)))
        kv = weighed.kv["large"] if weighed else self._kv("large", task, session, economics)
        prior = gain if self.classifier is not None or turn.gain is not None else None
        return self.cascade.model_copy(update={"threshold": threshold, "kv": kv, "prior": prior})
