"""All settings: one YAML file, overridden by BATON_* environment variables."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import limits
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

import policies

Tier = Literal["small", "large"]
ALIASES = ("auto", "small", "large")


def direction(tier: Tier) -> Literal["up", "down"]:
    """Which way a change of model into `tier` goes, as metrics, books and drift name it."""
    return "up" if tier == "large" else "down"


class ConfigError(ValueError):
    """Settings that cannot be used; the message names file, key and allowed values."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _http_url(value: Any) -> Any:
    if not isinstance(value, str) or urlsplit(value).scheme not in ("http", "https"):
        raise ValueError("must be an http:// or https:// URL")
    return value.rstrip("/")


def _mapper_url(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("unix:///"):
        return value
    if value is None:
        return None
    try:
        return _http_url(value)
    except ValueError:
        raise ValueError("must be http://HOST:PORT, https://... or unix:///PATH") from None


def _store_url(value: Any) -> Any:
    schemes = ("memory", "redis", "rediss", "unix")
    if not isinstance(value, str) or urlsplit(value).scheme not in schemes:
        raise ValueError("must be memory://, redis://, rediss:// or unix://PATH")
    return value


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
    url: Annotated[str, BeforeValidator(_http_url)]
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
    # An audit whose device is still in use so long after the turn is dropped.
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


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    processes: int = Field(default=1, ge=1, le=64)
    redis_url: Annotated[str, BeforeValidator(_store_url)] = "memory://"
    redis_password_file: Path | None = None
    mapper_url: Annotated[str | None, BeforeValidator(_mapper_url)] = None
    workers: list[Worker] = Field(min_length=1)
    # A policy's file, or the policy itself; `policies` adds named ones that a request
    # may ask for with the header x-baton-policy.
    policy: Path | dict[str, Any] = {"kind": "turns"}
    policies: dict[str, Path | dict[str, Any]] = {}
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    auth: Auth = Auth()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    transfers: Transfers = Transfers()
    retries: Retries = Retries()
    pool: Pool = Pool()
    sessions: Sessions = Sessions()
    prices: Prices = Prices()
    decisions: Decisions = Decisions()
    drift: Drift = Drift()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # What is passed in comes from the YAML file, and the environment goes before it.
        return env_settings, init_settings

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [worker.name for worker in self.workers]
        if len(set(names)) != len(names):
            raise ValueError("workers: two workers have the same name")
        tier_of: dict[str, str] = {}
        model_of: dict[str, str] = {}
        for worker in self.workers:
            if worker.model in ALIASES:
                raise ValueError(
                    f"workers: {worker.name}: model: {worker.model!r} is an alias of the gateway"
                )
            if tier_of.setdefault(worker.model, worker.tier) != worker.tier:
                raise ValueError(f"workers: model {worker.model!r} is in both tiers")
            # Sessions keep their KV lineage by model, so a tier has exactly one.
            if model_of.setdefault(worker.tier, worker.model) != worker.model:
                raise ValueError(f"workers: tier {worker.tier!r} has more than one model")
        if self.auth.keys_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host!r} is not loopback, so auth.keys_file must be set "
                "(without keys the gateway is open to whoever reaches it)"
            )
        if self.processes > 1 and self.redis_url.startswith("memory:"):
            raise ValueError("redis_url: memory:// serves one process only; set a Redis URL")
        for name, source in self.policy_sources().items():
            try:
                load_policy(source)
            except policies.PolicyError as error:
                raise ValueError(f"policy {name!r}: {error}") from None
        return self

    def policy_sources(self) -> dict[str, Path | dict[str, Any]]:
        return {"default": self.policy, **self.policies}


def load_policy(source: Path | dict[str, Any]) -> policies.Policy:
    if isinstance(source, Path):
        return policies.from_file(source)
    return policies.from_dict(source)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_secret(path: Path) -> str:
    """A secret's file holds the secret and perhaps a line end."""
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the secret: {error}") from None
    if not value:
        raise ConfigError(f"{path}: the secret is empty")
    return value


def load(path: str | Path) -> Settings:
    """Settings from a YAML file and the environment, or a ConfigError that says what to mend."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(data).__name__}")
    data = _beside(data, Path(path).resolve().parent)
    try:
        settings = Settings(**data)
    except ValidationError as error:
        lines = [f"{path}: {_explain(item)}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except Exception as error:  # pydantic-settings wraps unreadable environment values
        raise ConfigError(f"{path}: {error}") from None
    for secret in _secret_files(settings):
        read_secret(secret)
    return settings


def json_schema() -> dict[str, Any]:
    return Settings.model_json_schema()


def _beside(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths in the file are relative to the file."""

    def fix(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fix(str(name), item) for name, item in value.items()}
        if isinstance(value, list):
            return [fix(key, item) for item in value]
        if isinstance(value, str) and key.endswith("_file"):
            return str(folder / value)
        return value

    fixed = fix("", data)
    if isinstance(fixed.get("policy"), str):
        fixed["policy"] = str(folder / fixed["policy"])
    if isinstance(fixed.get("policies"), dict):
        fixed["policies"] = {
            name: str(folder / value) if isinstance(value, str) else value
            for name, value in fixed["policies"].items()
        }
    return fixed


def _secret_files(settings: Settings) -> list[Path]:
    files = [settings.redis_password_file, settings.auth.admin_key_file]
    files += [worker.api_key_file for worker in settings.workers]
    return [file for file in files if file is not None]


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = f"unknown key; allowed here: {', '.join(_allowed(item['loc'][:-1]))}"
    elif item["type"] == "missing":
        message = "is required"
    return f"{key}: {message}" if key else message


def _allowed(loc: tuple[Any, ...]) -> list[str]:
    sections = {"workers": Worker, "small": Price, "large": Price}
    model: Any = Settings
    for part in loc:
        if isinstance(part, str):
            model = sections.get(part) or model.model_fields[part].annotation
    return list(model.model_fields)
