"""How exact a turn's KV has to be: mapped, mapped with a longer native tail, or native."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.base import Frozen, Kv, SessionView, Task, TierEconomics

Share = Annotated[float, Field(ge=0, le=1)]


class KvChoice(Frozen):
    """By task class, by what the quality card says of that class, and by the drift so far."""

    default: Kv = "map"
    by_task: dict[Task, Kv] = Field(default_factory=dict)
    # Where the quality card keeps less than this share of native quality, it is native.
    min_retention: Share = 0.0
    # The card, for what the fleet does not report; 1 when neither says anything.
    retention: dict[Task, Share] = Field(default_factory=dict)
    # Nats per token; past it the session is answered from exact KV again.
    drift_budget: float | None = Field(default=None, gt=0)
    # Tokens of a hybrid's native tail beyond a map's own.
    hybrid_tail: int = Field(default=256, ge=0)

    def choose(self, task: Task, session: SessionView, live: TierEconomics) -> tuple[Kv, str]:
        """The choice and its reason."""
        if self.drift_budget is not None and session.drift > self.drift_budget:
            return "native", "drift_budget"
        if self.by_task.get(task) == "native":
            return "native", "task"
        if self.kept(task, live) < self.min_retention:
            return "native", "quality_card"
        if task in self.by_task:
            return self.by_task[task], "task"
        return self.default, "default"

    def kept(self, task: Task, live: TierEconomics) -> float:
        """The share of native quality that mapped KV keeps for this class."""
        return live.retention.get(task, self.retention.get(task, 1.0))

    def loss(self, task: Task, session: SessionView, live: TierEconomics) -> float:
        """Share of a right answer's value that mapping everything puts at risk.

        Grows with the drift that has come together: at the drift budget it has doubled.
        """
        loss = max(0.0, 1 - self.kept(task, live))
        if self.drift_budget is not None:
            loss *= 1 + max(0.0, session.drift) / self.drift_budget
        return min(1.0, loss)
