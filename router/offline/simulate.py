"""Runs sessions turn by turn under a policy and a cost model; no chance, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies import Decision, Economics, Policy, SessionView, Signals, Spent, TierEconomics
from policies import escalate as escalated
from policies.base import TIERS, Kv, Task, Tier, other
from policies.tasks import task_class
from router.offline.costmodel import CostModel, MapModel
from router.offline.sessions import ReplayTurn


@dataclass
class Turned:
    """What one turn came to."""

    session: str
    number: int
    tier: Tier
    reason: str
    money: float = 0.0
    seconds: float = 0.0
    # Until the first token that the client sees.
    first_token_seconds: float = 0.0
    quality: float | None = None
    switched: bool = False
    escalated: bool = False
    refused: bool = False
    prefilled: float = 0.0
    mapped: float = 0.0
    large_tokens: int = 0


@dataclass
class _State:
    """A session between turns. `holds`: tokens whose KV a tier has, and whether it is exact."""

    view: SessionView
    holds: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    lossy: dict[Tier, bool] = field(default_factory=lambda: dict.fromkeys(TIERS, False))


def simulate(
    sessions: dict[str, list[ReplayTurn]], policy: Policy, costs: CostModel
) -> list[Turned]:
    """All turns of all sessions, in order.

    Answers are as long as they were, whoever gives them. Quality is the recorded one of the
    tier that answers; as long as a tier's KV is mapped, in part or computed on top of it, it
    is multiplied by the map's retention for the class of task.
    """
    turns = []
    for name, recorded in sessions.items():
        state = _State(SessionView(id=name))
        for turn in recorded:
            turns.append(_Turn(turn, state, policy, costs).run())
    return turns


class _Turn:
    def __init__(self, turn: ReplayTurn, state: _State, policy: Policy, costs: CostModel) -> None:
        self.turn, self.state, self.policy, self.costs = turn, state, policy, costs
        self.done = Turned(turn.session, turn.turn, "small", "")

    def run(self) -> Turned:
        self._rest()
        seen = self.turn.as_turn()
        task = task_class(seen)
        decision = self.policy.decide(seen, self.state.view, self._economics())
        if decision.rejection is not None:
            self.done.tier, self.done.reason, self.done.refused = (
                decision.tier,
                decision.reason,
                True,
            )
            self.done.quality = 0.0 if self.turn.quality else None
            return self.done
        if decision.cascade is not None:
            decision = self._cascade(decision, task)
        else:
            self._answer(decision.tier, decision.kv, task, self.turn.completion_tokens)
        self._close(decision)
        return self.done

    def _rest(self) -> None:
        """Time passes since the last turn: workers forget."""
        idle = self.turn.idle_seconds
        if idle >= self.costs.cache_seconds:
            self.state.holds = dict.fromkeys(TIERS, 0)
            self.state.lossy = dict.fromkeys(TIERS, False)
        view = self.state.view
        tier = view.tier
        self.state.view = view.model_copy(
            update={"idle_seconds": idle, "lossy": bool(tier and self.state.lossy[tier])}
        )

    def _economics(self) -> Economics:
        """As the gateway would report it."""
        tiers = {}
        for tier in TIERS:
            model = self.costs.tier(tier)
            uncached = max(0, self.turn.prompt_tokens - self.state.holds[tier])
            mapped = self._mappable(tier, "map")
            ways = self.costs.map_to.get(tier)
            tiers[tier] = TierEconomics(
                context_tokens=model.context_tokens,
                prompt_price=model.prompt_price,
                cached_price=model.cached_price,
                completion_price=model.completion_price,
                uncached_tokens=uncached,
                lossy=self.state.lossy[tier],
                prefill_seconds=model.prefill_seconds(uncached, self.state.holds[tier]),
                decode_token_seconds=model.decode_token_seconds,
                mapped_share=mapped / uncached if uncached else 0.0,
                map_seconds=_map_seconds(ways, mapped),
                retention=ways.retention if ways else {},
            )
        return Economics(tiers=tiers)

    def _mappable(self, tier: Tier, kv: Kv) -> int:
        """Tokens that a transfer into `tier` would take over."""
        ways, source = self.costs.map_to.get(tier), other(tier)
        if kv == "native" or ways is None or self.state.view.tier != source:
            return 0
        tail = ways.native_tail + (ways.hybrid_tail if kv == "hybrid" else 0)
        there = min(self.state.holds[source], self.turn.prompt_tokens - tail)
        tokens = there - self.state.holds[tier]
        return tokens if tokens >= ways.least_tokens else 0

    def _cascade(self, decision: Decision, task: Task) -> Decision:
        """The small tier answers, or begins to; then the judgement."""
        cascade, total = decision.cascade, self.turn.completion_tokens
        known = {k: v for k, v in self.turn.signals.items() if k in Signals.model_fields}
        known["tokens"] = total
        if cascade.mode == "early":
            known["tokens"] = min(cascade.tokens, total)
        verdict = cascade.judge(Signals.model_validate(known))
        if not verdict.escalate:
            self._answer("small", decision.kv, task, total)
            # Held back until judged: the first token comes that much later.
            held = known["tokens"] * self.costs.small.decode_token_seconds
            self.done.first_token_seconds += held
            return decision
        # What the small tier has prefilled for its attempt it holds, and can be mapped.
        self._answer("small", decision.kv, task, known["tokens"])
        self.state.holds["small"] = self.turn.prompt_tokens
        attempt = self.done.seconds
        before = self.state.view
        self.state.view = before.model_copy(update={"tier": "small"})
        if before.tier == "large":
            self.state.view = before
        final = escalated(decision, verdict)
        self._answer("large", final.kv, task, total)
        self.state.view = before
        self.done.first_token_seconds += attempt
        self.done.escalated = True
        return final

    def _answer(self, tier: Tier, kv: Kv, task: Task, tokens: int) -> None:
        """Prefill, transfer and decoding on one tier; adds to what the turn costs."""
        state, model, prompt = self.state, self.costs.tier(tier), self.turn.prompt_tokens
        if state.lossy[tier] and kv == "native":
            # Re-anchored: only exact KV counts, and a lossy cache is none.
            state.holds[tier], state.lossy[tier] = 0, False
        held = min(state.holds[tier], prompt)
        mapped = self._mappable(tier, kv)
        uncached = prompt - held - mapped
        ways = self.costs.map_to.get(tier)
        prefill = model.prefill_seconds(uncached, held + mapped) + _map_seconds(ways, mapped)
        self.done.money += model.money(prompt, uncached, tokens)
        self.done.seconds += prefill + tokens * model.decode_token_seconds
        self.done.first_token_seconds = prefill
        self.done.prefilled += uncached
        self.done.mapped += mapped
        self.done.large_tokens += prompt + tokens if tier == "large" else 0
        state.lossy[tier] = state.lossy[tier] or mapped > 0
        state.holds[tier] = prompt + tokens
        self.done.quality = self._quality(tier, task)

    def _quality(self, tier: Tier, task: Task) -> float | None:
        quality = self.turn.quality.get(tier)
        ways = self.costs.map_to.get(tier)
        if quality is None or not self.state.lossy[tier] or ways is None:
            return quality
        return quality * ways.retention.get(task, 1.0)

    def _close(self, decision: Decision) -> None:
        """The session's state as the gateway keeps it."""
        view, done, tier = self.state.view, self.done, decision.tier
        done.tier, done.reason = tier, decision.reason
        done.switched = view.tier not in (None, tier)
        ways, lossy = self.costs.map_to.get(tier), self.state.lossy[tier]
        drift = view.drift + ways.drift_per_turn if ways and lossy else 0.0
        spent = Spent(
            money=view.spent.money + done.money,
            large_tokens=view.spent.large_tokens + done.large_tokens,
        )
        self.state.view = view.model_copy(
            update={
                "turns": view.turns + 1,
                "tier": tier,
                "stay": view.stay + 1 if view.tier == tier else 1,
                "switches_up": view.switches_up + (done.switched and tier == "large"),
                "switches_down": view.switches_down + (done.switched and tier == "small"),
                "mapped_tokens": view.mapped_tokens + int(done.mapped),
                "drift": drift,
                "spent": spent,
                "memory": decision.memory,
            }
        )


def _map_seconds(ways: MapModel | None, tokens: float) -> float:
    if ways is None or not tokens:
        return 0.0
    return ways.transfer_seconds + tokens * ways.token_seconds
