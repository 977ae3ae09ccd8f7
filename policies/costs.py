"""What a turn costs on each tier, and the gain in quality at which the large one pays."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from policies.base import TIERS, Economics, Frozen, Kv, SessionView, Task, Tier, TierEconomics, Turn
from policies.kv import KvChoice

# For prompts that nobody has counted yet.
_CHARS_PER_TOKEN = 4


class TierCosts(Frozen):
    """Prices per million tokens and speeds, for what the fleet's live models do not say."""

    prompt_price: float = Field(ge=0)
    completion_price: float = Field(ge=0)
    # Prompt tokens that the worker already holds; the full price when not given.
    cached_price: float | None = Field(default=None, ge=0)
    prefill_tokens_per_second: float = Field(gt=0)
    decode_tokens_per_second: float = Field(gt=0)
    # Tokens a second that are carried over into this tier.
    map_tokens_per_second: float = Field(default=2000, gt=0)


class Cost(NamedTuple):
    """Of one turn on one tier: money, seconds, and quality put at risk (in money)."""

    decode: float
    prefill: float
    penalty: float

    @property
    def total(self) -> float:
        return self.decode + self.prefill + self.penalty


class Weighed(NamedTuple):
    """One turn on each tier, and the money that a gain of one is worth."""

    small: Cost
    large: Cost
    value: float
    # How each tier would best answer: as the rules say, or natively where that is cheaper.
    kv: dict[Tier, Kv]

    @property
    def bar(self) -> float:
        """The gain at which both tiers are worth the same."""
        return (self.large.total - self.small.total) / self.value

    def bar_after(self, answered: float) -> float:
        """The same once the small tier has given so much of its answer: that is paid for."""
        return (self.large.total - (1 - answered) * self.small.decode) / self.value

    def scores(self) -> dict[str, float]:
        return {
            "extra_decode": self.large.decode - self.small.decode,
            "extra_prefill": self.large.prefill - self.small.prefill,
            "extra_penalty": self.large.penalty - self.small.penalty,
            "value": self.value,
        }


class Switching(Frozen):
    """Escalate only if gain * value > extra decode + (1 - mapped share) * prefill + penalty.

    `value` is what a right answer in place of a wrong one is worth, `second_price` what a
    second of waiting costs, both in the currency of the prices.
    """

    value: float = Field(gt=0)
    second_price: float = Field(default=0.0, ge=0)
    # Expected length of an answer.
    answer_tokens: int = Field(default=200, ge=1)
    small: TierCosts
    large: TierCosts

    def weigh(
        self, turn: Turn, session: SessionView, economics: Economics, task: Task, kv: KvChoice
    ) -> Weighed:
        """Both tiers' costs; one comparison serves both directions.

        The tier that has the session pays no prefill of the conversation, the other one pays
        what a map does not take over.
        """
        kvs: dict[Tier, Kv] = {}
        costs: dict[Tier, Cost] = {}
        for tier in TIERS:
            wanted, _ = kv.choose(task, session, economics.tiers.get(tier) or TierEconomics())
            ways = {
                way: self.cost(tier, turn, session, economics, task, kv, way)
                for way in dict.fromkeys((wanted, "native"))
            }
            kvs[tier] = min(ways, key=lambda way, ways=ways: ways[way].total)
            costs[tier] = ways[kvs[tier]]
        return Weighed(costs["small"], costs["large"], self.value, kvs)

    def cost(
        self,
        tier: Tier,
        turn: Turn,
        session: SessionView,
        economics: Economics,
        task: Task,
        choice: KvChoice,
        kv: Kv,
    ) -> Cost:
        costs: TierCosts = getattr(self, tier)
        live = economics.tiers.get(tier) or TierEconomics()
        prompt = prompt_tokens(turn)
        stays = session.tier == tier
        uncached = _uncached(live, turn, session, stays, kv)
        prefill_seconds = uncached / costs.prefill_tokens_per_second
        if live.prefill_seconds is not None and live.uncached_tokens:
            prefill_seconds = live.prefill_seconds * uncached / live.uncached_tokens
        share = 0.0 if stays or session.tier is None else mapped_share(live, uncached, kv, choice)
        taken = share * uncached
        map_seconds = taken / costs.map_tokens_per_second
        if live.map_seconds is not None and taken:
            map_seconds = live.map_seconds
        prompt_price = _first(live.prompt_price, costs.prompt_price)
        cached_price = _first(live.cached_price, costs.cached_price, prompt_price)
        rest = uncached - taken
        prefill = rest * prompt_price + max(0.0, prompt - rest) * cached_price
        seconds = (1 - share) * prefill_seconds + map_seconds
        # A tier that goes on with mapped KV answers from it as one does that begins to.
        inexact = 1.0 if stays and session.lossy and kv != "native" else share
        answer = self.answer_length(turn)
        token_seconds = _first(live.decode_token_seconds, 1 / costs.decode_tokens_per_second)
        token_price = _first(live.completion_price, costs.completion_price) / 1e6
        return Cost(
            decode=answer * (token_price + token_seconds * self.second_price),
            prefill=prefill / 1e6 + seconds * self.second_price,
            penalty=self.value * inexact * choice.loss(task, session, live),
        )

    def answer_length(self, turn: Turn) -> int:
        return min(self.answer_tokens, turn.max_tokens or self.answer_tokens)


def prompt_tokens(turn: Turn) -> int:
    if turn.prompt_tokens is not None:
        return turn.prompt_tokens
    return turn.prompt_chars // _CHARS_PER_TOKEN


def mapped_share(live: TierEconomics, uncached: float, kv: Kv, choice: KvChoice) -> float:
    """Of `uncached` tokens, what a map takes over; a hybrid's longer native tail is taken off."""
    if kv == "native" or not uncached or not live.mapped_share:
        return 0.0
    tail = choice.hybrid_tail if kv == "hybrid" else 0
    return max(0.0, live.mapped_share - tail / uncached)


def _uncached(live: TierEconomics, turn: Turn, session: SessionView, stays: bool, kv: Kv) -> float:
    if stays and session.lossy and kv == "native":
        # Re-anchored: nothing of a lossy lineage is used.
        return prompt_tokens(turn)
    if live.uncached_tokens is not None:
        return live.uncached_tokens
    new = len(turn.text) / _CHARS_PER_TOKEN
    return min(new, prompt_tokens(turn)) if stays else prompt_tokens(turn)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
