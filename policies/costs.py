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
    """Of answering on one tier for a stay of several turns: money, seconds, and quality put at
    risk, all in money. `catch_up` is paid once, the others turn by turn."""

    decode: float
    # Reading the prompt by a tier that has the conversation: cached tokens, and new ones.
    prompt: float
    # Bringing the tier up to date, by prefill and by map.
    catch_up: float
    penalty: float

    def a_turn(self, stay: int) -> float:
        return self.decode + self.prompt + self.catch_up / stay + self.penalty


class Weighed(NamedTuple):
    """One turn on each tier, and the money that a gain of one is worth."""

    small: Cost
    large: Cost
    value: float
    # Turns that catching up serves.
    stay: int
    # How each tier would best answer: as the rules say, or natively where that is cheaper.
    kv: dict[Tier, Kv]

    @property
    def bar(self) -> float:
        """The gain at which both tiers are worth the same."""
        return (self.large.a_turn(self.stay) - self.small.a_turn(self.stay)) / self.value

    def bar_after(self, answered: float) -> float:
        """The same once the small tier has given so much of its answer: that is paid for."""
        left = (1 - answered) * self.small.decode + self.small.penalty
        return (self.large.a_turn(self.stay) - left) / self.value

    def scores(self) -> dict[str, float]:
        return {
            "extra_decode": self.large.decode - self.small.decode,
            "extra_prompt": self.large.prompt - self.small.prompt,
            "extra_catch_up": self.large.catch_up - self.small.catch_up,
            "extra_penalty": self.large.penalty - self.small.penalty,
            "value": self.value,
        }


class Switching(Frozen):
    """Escalate only if gain * value > extra decode + prompt + catch-up / stay + penalty.

    `value` is what a right answer in place of a wrong one is worth, `second_price` what a
    second of waiting costs, both in the currency of the prices. Catching up is the prefill
    that a map does not take over, and the map.
    """

    value: float = Field(gt=0)
    # Turns that share what it costs to bring a tier up to date. With 1 each turn has to
    # pay for it alone; it then goes up too late in long conversations, and maps what is
    # prefilled in a moment but answered from for the rest of the session.
    stay_turns: int = Field(default=8, ge=1)
    # Share of answers from exact KV that are right: what a map can spoil at all.
    answer_quality: float = Field(default=1.0, ge=0, le=1)
    second_price: float = Field(default=0.0, ge=0)
    # Expected length of an answer.
    answer_tokens: int = Field(default=200, ge=1)
    small: TierCosts
    large: TierCosts

    def weigh(
        self, turn: Turn, session: SessionView, economics: Economics, task: Task, kv: KvChoice
    ) -> Weighed:
        """Both tiers' costs; one comparison serves both directions.

        The tier that has the session has nothing to catch up on, the other one has what a
        map does not take over.
        """
        kvs: dict[Tier, Kv] = {}
        costs: dict[Tier, Cost] = {}
        for tier in TIERS:
            wanted, _ = kv.choose(task, session, economics.tiers.get(tier) or TierEconomics())
            ways = {
                way: self.cost(tier, turn, session, economics, task, kv, way)
                for way in dict.fromkeys((wanted, "native"))
            }
            kvs[tier] = min(ways, key=lambda way, ways=ways: ways[way].a_turn(self.stay_turns))
            costs[tier] = ways[kvs[tier]]
        return Weighed(costs["small"], costs["large"], self.value, self.stay_turns, kvs)

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
        lossy = live.lossy or (stays and session.lossy)
        uncached = _uncached(live, turn, stays, lossy and kv == "native")
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
        missing = uncached - taken
        # What the user has just written every tier reads; the rest it has missed.
        new = min(len(turn.text) / _CHARS_PER_TOKEN, missing)
        token_prefill = prefill_seconds / uncached * self.second_price if uncached else 0.0
        cached_money = max(0.0, prompt - new) * cached_price / 1e6
        # A tier that goes on with mapped KV answers from it as one does that begins to.
        inexact = 1.0 if lossy and kv != "native" else share
        answer = self.answer_length(turn)
        token_seconds = _first(live.decode_token_seconds, 1 / costs.decode_tokens_per_second)
        token_price = _first(live.completion_price, costs.completion_price) / 1e6
        return Cost(
            decode=answer * (token_price + token_seconds * self.second_price),
            prompt=cached_money + new * (prompt_price / 1e6 + token_prefill),
            catch_up=(missing - new) * ((prompt_price - cached_price) / 1e6 + token_prefill)
            + map_seconds * self.second_price,
            penalty=self.value * self.answer_quality * inexact * choice.loss(task, session, live),
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


def _uncached(live: TierEconomics, turn: Turn, stays: bool, reanchored: bool) -> float:
    if reanchored:
        # Nothing of a lossy lineage is used.
        return prompt_tokens(turn)
    if live.uncached_tokens is not None:
        return live.uncached_tokens
    new = len(turn.text) / _CHARS_PER_TOKEN
    return min(new, prompt_tokens(turn)) if stays else prompt_tokens(turn)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
