"""Policies from YAML, chosen by `kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from policies.base import Policy
from policies.pinned import Pinned
from policies.turns import Turns

KINDS: dict[str, type[Policy]] = {"pinned": Pinned, "turns": Turns}


class PolicyError(ValueError):
    """A policy that cannot be loaded; the message names the place, the key and what is allowed."""


def from_dict(data: Any, where: str = "policy") -> Policy:
    if not isinstance(data, dict):
        raise PolicyError(f"{where}: expected a mapping with a `kind`, got {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PolicyError(f"{where}: kind: {kind!r} is not one of {', '.join(sorted(KINDS))}")
    try:
        return KINDS[kind](**data)
    except (ValidationError, TypeError) as error:
        raise PolicyError(f"{where}: {_explain(error, KINDS[kind])}") from None


def from_file(path: str | Path) -> Policy:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(f"{path}: {error}") from None
    return from_dict(data, where=str(path))


def _explain(error: Exception, policy: type) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(policy)"
        message = item["msg"]
        if item["type"] == "extra_forbidden":
            message = f"unknown key; allowed: {', '.join(policy.model_fields)}"
        parts.append(f"{key}: {message}")
    return "; ".join(parts)
