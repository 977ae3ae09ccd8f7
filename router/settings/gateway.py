"""The whole of the settings, and what has to agree in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

import policies
from router.settings.sections import (
    ALIASES,
    Auth,
    Decisions,
    Drift,
    Limits,
    Pool,
    Prices,
    Retries,
    Sessions,
    Timeouts,
    Transfers,
    Worker,
    http_url,
    is_loopback,
)


def _mapper_url(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("unix:///"):
        return value
    if value is None:
        return None
    try:
        return http_url(value)
    except ValueError:
        raise ValueError("must be http://HOST:PORT, https://... or unix:///PATH") from None


def _store_url(value: Any) -> Any:
    schemes = ("memory", "redis", "rediss", "unix")
    if not isinstance(value, str) or urlsplit(value).scheme not in schemes:
        raise ValueError("must be memory://, redis://, rediss:// or unix://PATH")
    return value


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
