"""The sections of the settings, with their defaults and limits."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import limits
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Tier = Literal["small", "large"]
ALIASES = ("auto", "small", "large")


def direction(tier: Tier) -> Literal["up", "down"]:
    """Which way a change of model into `tier` goes, as metrics, books and drift name it."""
    return "up" if tier == "large" else "down"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def http_url(value: Any) -> Any:
    if not isinstance(value, str) or urlsplit(value).scheme not in ("http", "https"):
        raise ValueError("must be an http:// or https:// URL")
    return value.rstrip("/")


def _rate(value: Any) -> Any:
    try:
        if value is not None:
            limits.parse(value)
    except (ValueError, TypeError):
        raise ValueError('must be a rate such as "600/minute"') from None
    return value


class Worker(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    tier: Tier
    url: Annotated[str, BeforeValidator(http_url)]
    # The name under which the worker serves its model.
    model: str = Field(min_length=1, max_length=256)
    # Sent to the worker as a bearer token, in place of anything the client sent.
    api_key_file: Path | None = None
    health_path: str = Field(default="/health", pattern=r"^/")
    # The longest prompt and answer together; null asks the worker.
    context_tokens: int | None = Field(default=None, ge=1)
    # What it computes on, such as "node1/gpu0"; workers with the same one share it. Null: its
    # URL's host, of which all workers are taken to share one device.
    device: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")

    @property
    def computes_on(self) -> str:
        if self.device is not None:
            return self.device
        host = urlsplit(self.url).hostname or ""
        return "localhost" if is_loopback(host) else host


class Limits(Section):
    concurrency_per_tier: int = Field(default=64, ge=1)
    concurrency_per_tenant: int = Field(default=64, ge=1)
    queue_per_tier: int = Field(default=128, ge=0)
    queue_seconds: float = Field(default=30.0, gt=0)
    body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    header_bytes: int = Field(default=32 * 1024, ge=1024)
    # In the words of the `limits` library, such as "600/minute"; null for no limit.
    requests_per_tenant: Annotated[str | None, BeforeValidator(_rate)] = None


class Timeouts(Section):
    headers_seconds: float = Field(default=10.0, gt=0)
    body_seconds: float = Field(default=30.0, gt=0)
    connect_seconds: float = Field(default=3.0, gt=0)
    # From sending to the worker until its first event; prefill of a long prompt is in it.
    first_event_seconds: float = Field(default=120.0, gt=0)
    # Between two events of a running stream.
    idle_seconds: float = Field(default=60.0, gt=0)
    request_seconds: float = Field(default=600.0, gt=0)
    tokenize_seconds: float = Field(default=2.0, gt=0)
    store_seconds: float = Field(default=0.5, gt=0)
    # A client that reads nothing for this long loses its stream.
    client_write_seconds: float = Field(default=60.0, gt=0)
    # At shutdown: how long readiness is withdrawn before the listener closes, and how
    # long open requests may take after that.
    drain_delay_seconds: float = Field(default=1.0, ge=0)
    drain_seconds: float = Field(default=30.0, gt=0)


class Transfers(Section):
    deadline_ms: int = Field(default=2000, ge=1)
    # The last tokens of the prompt that the target always prefills itself; null leaves
    # it to the mapper, and a policy's `hybrid` asks for `hybrid_tail`.
    native_tail: int | None = Field(default=None, ge=0)
    hybrid_tail: int = Field(default=256, ge=0)
    # Fewer tokens than this are prefilled natively: an exact cache for little money.
    min_mapped_tokens: int = Field(default=192, ge=0)


class Retries(Section):
    attempts: int = Field(default=3, ge=1, le=10)
    backoff_seconds: float = Field(default=0.05, ge=0)
    # Send the same request to a second worker of the tier when the first has not
    # answered by then; null for never.
    hedge_after_seconds: float | None = Field(default=None, gt=0)


class Pool(Section):
    connections_per_worker: int = Field(default=128, ge=1)
    # Below the five seconds after which uvicorn, and so SGLang, closes an idle connection.
    keepalive_seconds: float = Field(default=4.0, gt=0)
    health_seconds: float = Field(default=5.0, gt=0)
    health_timeout_seconds: float = Field(default=25.0, gt=0)
    breaker_failures: int = Field(default=5, ge=1)
    breaker_seconds: float = Field(default=10.0, gt=0)
    # No worker takes more than this many times its share while another has room.
    load_bound: float = Field(default=1.25, ge=1.0)


class Auth(Section):
    # Hashed API keys; without a file there is one open tenant, on loopback only.
    keys_file: Path | None = None
    admin_key_file: Path | None = None
    cors_origins: list[str] | None = None


class Sessions(Section):
    ttl_seconds: int = Field(default=24 * 3600, ge=1)


class Drift(Section):
    # Nats per token, summed over a lineage's turns since it was exact; past it the session's
    # next turn is prefilled natively.
    budget_nats: float = Field(default=0.5, ge=0)
    # What a turn on mapped KV is charged until an audit has measured some.
    expected_nats: float = Field(default=0.1, ge=0)
    # Share of the turns on mapped KV that are audited, for all policies and by a policy's name.
    audit_rate: float = Field(default=0.1, ge=0, le=1)
    audit_rates: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    # A turn whose lineage holds at least so many mapped tokens is always audited; null for never.
    audit_above_tokens: int | None = Field(default=512, ge=0)
    # Audits that wait for one device; what comes then is dropped.
    audit_queue: int = Field(default=64, ge=1)
    # A device must have been idle so long before an audit uses it: not within a user's burst.
    audit_idle_seconds: float = Field(default=0.5, ge=0)
    # Audits use at most this share of a device's time: as many of its users find one running.
    audit_share: float = Field(default=0.05, gt=0, le=1)
    # An audit that has not got on for so long is dropped.
    audit_wait_seconds: float = Field(default=60.0, ge=0)
    # An audit computes so many tokens at a time; a user who comes waits for no more than that.
    audit_piece_tokens: int = Field(default=256, ge=16)
    audit_priority: int = Field(default=-10, le=0)
    # Map pages to the large model ahead of a switch that is at least this probable; null for
    # never. The probability is a policy's score `switch_probability`, else the value here.
    ahead_above: float | None = Field(default=0.5, gt=0, le=1)
    switch_probability: float = Field(default=0.0, ge=0, le=1)
    ahead_deadline_ms: int = Field(default=10_000, ge=1)
    # Pages mapped ahead that no turn has used by then are counted as wasted.
    ahead_wasted_seconds: float = Field(default=600.0, gt=0)


class Price(Section):
    """Money per million tokens."""

    prompt: float = Field(ge=0)
    # Prompt tokens that the worker had in its cache; null for the price of all others.
    cached: float | None = Field(default=None, ge=0)
    completion: float = Field(ge=0)

    @property
    def of_cached(self) -> float:
        return self.prompt if self.cached is None else self.cached


class Prices(Section):
    small: Price | None = None
    large: Price | None = None

    def of(self, tier: Tier) -> Price | None:
        return self.small if tier == "small" else self.large


class Decisions(Section):
    # One JSON object a decision, which `baton tune` and `baton replay` read; null for none.
    log_file: Path | None = None
    # Adds what users wrote to that file, in plain text.
    log_text: bool = False
