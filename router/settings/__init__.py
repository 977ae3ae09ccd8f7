"""All settings: one YAML file, overridden by BATON_* environment variables."""

from router.settings.file import ConfigError, json_schema, load, read_secret
from router.settings.gateway import Settings, load_policy
from router.settings.sections import (
    ALIASES,
    Auth,
    Decisions,
    Drift,
    Limits,
    Pool,
    Price,
    Prices,
    Retries,
    Section,
    Sessions,
    Tier,
    Timeouts,
    Transfers,
    Worker,
    direction,
    is_loopback,
)

__all__ = [
    "ALIASES",
    "Auth",
    "ConfigError",
    "Decisions",
    "Drift",
    "Limits",
    "Pool",
    "Price",
    "Prices",
    "Retries",
    "Section",
    "Sessions",
    "Settings",
    "Tier",
    "Timeouts",
    "Transfers",
    "Worker",
    "direction",
    "is_loopback",
    "json_schema",
    "load",
    "load_policy",
    "read_secret",
]
