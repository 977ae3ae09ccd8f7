"""The wire protocol between gateway and mapper; mapper/README.md describes it for other clients."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 1_048_576
Status = Literal["applied", "fallback_reprefill", "unsupported"]


class Reason(StrEnum):
    """Why a transfer ended as it did: a closed set, fit for a metric label."""

    MAPPED = "mapped"
    REUSED = "reused"
    EXACT = "exact"
    DEADLINE = "deadline"
    TOO_SHORT = "too_short"
    TOO_LITTLE = "too_little"
    NO_SOURCE_PAGES = "no_source_pages"
    NO_SINK = "no_sink"
    STORE_FULL = "store_full"
    YIELDED = "yielded"
    UNKNOWN_MODEL = "unknown_model"
    NO_ARTIFACT = "no_artifact"
    MISMATCH = "mismatch"
    ERROR = "error"


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cache(_Wire):
    """One model's caches of this conversation: a served model name and a namespace."""

    model: str
    extra_key: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1)


class TransferRequest(_Wire):
    """`native_tail`: tokens the target prefills itself; None leaves it to the artifact.

    With fewer than `min_mapped_tokens` to map, and none mapped earlier, nothing is done: a
    native prefill of so little is soon over, and leaves an exact cache.

    A `background` transfer is one nobody waits for yet: it makes way for every other one, and
    ends when its client closes the connection. What it has mapped by then stays.
    """

    session: str = Field(max_length=512)
    token_ids: list[Annotated[int, Field(ge=0, le=0xFFFFFFFF)]] = Field(max_length=MAX_TOKENS)
    deadline_ms: int = Field(gt=0, le=600_000)
    native_tail: int | None = Field(default=None, ge=0)
    min_mapped_tokens: int = Field(default=0, ge=0)
    background: bool = False
    source: Cache
    target: Cache

    @model_validator(mode="after")
    def _one_tenant(self) -> Self:
        if self.source.cache_salt != self.target.cache_salt:
            raise ValueError(
                "source and target must have the same cache_salt: one tenant's KV "
                "is never made reachable for another"
            )
        return self


class TransferResult(_Wire):
    """`tokens` is the prefix that the target can now restore under `target.extra_key`.

    Of it, `exact_tokens` is the leading part that the target would have restored from its
    own exact pages without any transfer; `mapped_tokens` were converted by this call and
    `reused_tokens` were in the lineage already. With `reason` `exact` there is nothing but
    exact pages, and the target should be asked under `extra_key = None`.
    """

    status: Status
    reason: Reason
    pages: int = 0
    tokens: int = 0
    exact_tokens: int = 0
    mapped_tokens: int = 0
    reused_tokens: int = 0
    ms: float = 0.0
    pair: str
    field: str | None = None
    detail: str | None = None


class Pair(_Wire):
    """A direction between two live models, and whether it can be mapped."""

    source: str
    target: str
    status: Literal["ready", "unsupported"]
    artifact: str | None = None
    field: str | None = None
    detail: str | None = None
    quality: dict | None = None
