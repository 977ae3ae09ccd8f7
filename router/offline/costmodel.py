"""What turns cost in a replay: money by price, seconds by prefill, mapping and decoding."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from policies.base import Frozen, Task, Tier
from router.offline.records import RecordError

DEMO = Path(__file__).with_name("demo_costs.yaml")


class TierModel(Frozen):
    """Money per million tokens; seconds = tokens * token + attention over what is before."""

    prompt_price: float = Field(ge=0)
    cached_price: float = Field(ge=0)
    completion_price: float = Field(ge=0)
    prefill_token_seconds: float = Field(gt=0)
    # Per token and million tokens of context that it attends to.
    attention_seconds: float = Field(default=0.0, ge=0)
    decode_token_seconds: float = Field(gt=0)
    context_tokens: int | None = Field(default=None, ge=1)

    def prefill_seconds(self, tokens: float, cached: float) -> float:
        attended = tokens * (cached + tokens / 2) / 1e6
        return tokens * self.prefill_token_seconds + attended * self.attention_seconds

    def money(self, prompt: float, uncached: float, completion: float) -> float:
        return (
            uncached * self.prompt_price
            + (prompt - uncached) * self.cached_price
            + completion * self.completion_price
        ) / 1e6


class MapModel(Frozen):
    """Of one direction: seconds, and what of native quality mapped KV keeps by task class."""

    transfer_seconds: float = Field(default=0.0, ge=0)
    token_seconds: float = Field(ge=0)
    # Tokens at a prompt's end that are always prefilled; shorter transfers are not made.
    native_tail: int = Field(default=64, ge=0)
    hybrid_tail: int = Field(default=256, ge=0)
    least_tokens: int = Field(default=192, ge=1)
    retention: dict[Task, float] = Field(default_factory=dict)
    # Nats a token that each turn on mapped KV adds to the session's drift.
    drift_per_turn: float = Field(default=0.0, ge=0)


class CostModel(Frozen):
    """`second_price` puts seconds and money into one sum; 0 leaves seconds out of it."""

    second_price: float = Field(ge=0)
    small: TierModel
    large: TierModel
    # Into the tier.
    map_to: dict[Tier, MapModel] = Field(default_factory=dict)
    # A worker forgets a session's KV after a pause of this length.
    cache_seconds: float = Field(default=3600.0, gt=0)

    def tier(self, tier: Tier) -> TierModel:
        return getattr(self, tier)


def read_costs(path: Path) -> CostModel:
    """Raises RecordError with file and key."""
    try:
        return CostModel.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecordError(f"{path}: {error}") from None
    except ValidationError as error:
        faults = "\n".join(
            f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise RecordError(faults) from None
