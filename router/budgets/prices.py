"""What a turn's tokens cost."""

from __future__ import annotations

from policies import Spent
from router.relay.parser import Usage
from router.settings import Price, Tier


def cost(tier: Tier, price: Price | None, usage: Usage) -> Spent:
    """Money by the tier's prices a million tokens (none: no money), and large-tier tokens."""
    large = usage.prompt_tokens + usage.completion_tokens if tier == "large" else 0
    if price is None:
        return Spent(large_tokens=large)
    cached = min(usage.cached_tokens or 0, usage.prompt_tokens)
    money = (
        (usage.prompt_tokens - cached) * price.prompt
        + cached * price.of_cached
        + usage.completion_tokens * price.completion
    )
    return Spent(money=money / 1e6, large_tokens=large)
