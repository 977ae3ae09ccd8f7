"""Which session a request belongs to: named by the client, or found by its conversation."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.errors import ApiError
from router.sessions.base import Session, Store

MAX_ID = 256


@dataclass(frozen=True)
class Identity:
    id: str
    session: Session | None
    # Of the conversation as sent, to be extended by the answer; None when the client names
    # its session itself.
    digest: str | None


def named(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Header x-session-id, else metadata.session_id, else prompt_cache_key."""
    metadata = body.get("metadata")
    candidates = (
        (headers.get("x-session-id"), "x-session-id"),
        (metadata.get("session_id") if isinstance(metadata, dict) else None, "metadata"),
        (body.get("prompt_cache_key"), "prompt_cache_key"),
    )
    for value, param in candidates:
        if value is None or value == "":
            continue
        if not isinstance(value, str) or len(value) > MAX_ID or not value.isprintable():
            raise ApiError(
                400, f"A session id is up to {MAX_ID} printable characters.", param=param
            )
        return value
    return None


async def identify(
    store: Store, tenant: str, name: str | None, messages: Sequence[Mapping[str, Any]]
) -> Identity:
    """May raise StoreDown."""
    if name is not None:
        return Identity(name, await store.get(tenant, name), None)
    digest = conversation(messages)
    prefix = answered(messages)
    if prefix is not None and (id := await store.find(tenant, prefix)) is not None:
        session = await store.get(tenant, id)
        if session is not None and session.head == prefix:
            return Identity(id, session, digest)
        if session is not None:
            # The conversation went on from an earlier point than where it now stands:
            # an edit, a regenerated answer or two clients on the same history.
            fresh = new_id()
            turns = sum(message.get("role") == "assistant" for message in messages)
            return Identity(fresh, session.branch(fresh, turns), digest)
    return Identity(new_id(), None, digest)


def new_id() -> str:
    return f"conv-{uuid.uuid4().hex}"


def conversation(messages: Sequence[Mapping[str, Any]], start: str = "") -> str:
    """A chained digest, so that a longer conversation extends a shorter one's."""
    digest = start
    for message in messages:
        digest = hashlib.sha256(digest.encode() + _canonical(message)).hexdigest()
    return digest


def answered(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Digest of the conversation up to the last answer in it."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].get("role") == "assistant":
            return conversation(messages[:end])
    return None


def _canonical(message: Mapping[str, Any]) -> bytes:
    """What both sides agree on after a client has parsed an answer and sent it back."""
    calls = message.get("tool_calls")
    return orjson.dumps(
        [
            message.get("role"),
            _text(message.get("content")),
            [_call(call) for call in calls] if isinstance(calls, list) else [],
            message.get("tool_call_id"),
        ],
        option=orjson.OPT_SORT_KEYS,
    )


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    return [call.get("id"), function.get("name"), function.get("arguments")]
