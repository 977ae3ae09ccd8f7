"""The file of API keys, and what a key allows."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from router import log
from router.settings import ConfigError
from router.stamp import stamp

logger = log.get("auth")

# bt-<id>-<secret>: the id finds the entry, the secret is compared in constant time.
_KEY = re.compile(r"^bt-([0-9a-f]{12})-([A-Za-z0-9_-]{43})$")
_RECHECK_SECONDS = 1.0

Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    tenant: Tenant
    # SHA-256 of a secret of 256 random bits, which cannot be guessed from its hash.
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    # None allows all.
    models: list[str] | None = None
    policies: list[str] | None = None
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: bool = False

    def valid(self) -> bool:
        return not self.revoked and (self.expires is None or datetime.now(UTC) < self.expires)


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: list[Key] = []


class Principal(BaseModel):
    """Who sent a request, and what it may use."""

    model_config = ConfigDict(frozen=True)

    tenant: Tenant
    models: list[str] | None = None
    policies: list[str] | None = None

    def may_use_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def may_use_policy(self, name: str) -> bool:
        return name == "default" or self.policies is None or name in self.policies


OPEN = Principal(tenant="default")


class Keys:
    """Keys as they are in the file now; a file that turns bad leaves the last good ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checked = time.monotonic()
        self._stamp = stamp(path)
        self._keys = _index(read(path))

    def authenticate(self, presented: str) -> Principal | None:
        self._refresh()
        match = _KEY.match(presented)
        key_id, secret = match.groups() if match else ("", "")
        key = self._keys.get(key_id)
        expected = key.hash if key is not None else "0" * 64
        same = hmac.compare_digest(_hash(secret), expected)
        if key is None or not same or not key.valid():
            return None
        return Principal(tenant=key.tenant, models=key.models, policies=key.policies)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < _RECHECK_SECONDS:
            return
        self._checked = now
        found = stamp(self._path)
        if found == self._stamp:
            return
        self._stamp = found
        try:
            self._keys = _index(read(self._path))
            logger.info("keys_reloaded", keys=len(self._keys))
        except ConfigError as error:
            logger.error("keys_unreadable", error=str(error))


def read(path: Path) -> KeyFile:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return KeyFile.model_validate(data or {})
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file; `baton keys create` makes one") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        # Without the input, which may hold what should not be in a log.
        items = error.errors(include_input=False, include_url=False)
        text = "; ".join(f"{'.'.join(map(str, i['loc']))}: {i['msg']}" for i in items)
        raise ConfigError(f"{path}: {text}") from None


def create(
    path: Path,
    tenant: str,
    *,
    models: list[str] | None = None,
    policies: list[str] | None = None,
    expires: datetime | None = None,
) -> str:
    """Adds a key and returns it; only its hash is kept, so this is the one time to see it."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    try:
        key = Key(
            id=key_id,
            tenant=tenant,
            hash=_hash(secret),
            models=models,
            policies=policies,
            created=datetime.now(UTC),
            expires=expires,
        )
    except ValidationError as error:
        items = error.errors(include_input=False, include_url=False)
        raise ConfigError("; ".join(f"{i['loc'][0]}: {i['msg']}" for i in items)) from None
    with _locked(path):
        keys = read(path).keys if path.exists() else []
        _write(path, KeyFile(keys=[*keys, key]))
    return f"bt-{key_id}-{secret}"


def list_keys(path: Path) -> list[Key]:
    return read(path).keys


def revoke(path: Path, key_id: str) -> bool:
    """Whether there was such a key that still worked."""
    with _locked(path):
        keys = read(path).keys
        found = [key for key in keys if key.id == key_id and not key.revoked]
        if not found:
            return False
        changed = [
            key.model_copy(update={"revoked": True}) if key.id == key_id else key for key in keys
        ]
        _write(path, KeyFile(keys=changed))
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    with open(lock, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: KeyFile) -> None:
    # A new file renamed over the old one: a reader sees either, and never half of one.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yaml.safe_dump(keys.model_dump(mode="json"), file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _index(file: KeyFile) -> dict[str, Key]:
    return {key.id: key for key in file.keys}


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
