"""Settings out of a YAML file, or an error that names the file, the key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from router.settings.gateway import Settings
from router.settings.sections import Price, Worker


class ConfigError(ValueError):
    """Settings that cannot be used; the message names file, key and allowed values."""


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
