"""The request as a worker gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields that steer a worker and would let one tenant reach into another's cache, session
# or place in the queue, or run code in the worker. The gateway sets the first two itself.
OWNED = frozenset(
    {
        "extra_key",
        "cache_salt",
        "priority",
        "rid",
        "session_id",
        "session_params",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "custom_logit_processor",
        "prompt_cache_key",
    }
)

# What is passed on of the client's headers; its credentials are not.
_TRACE_HEADERS = ("traceparent", "tracestate")


def wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def normalise(body: dict[str, Any]) -> dict[str, Any]:
    """The client's body without the gateway's fields, before a worker is chosen."""
    clean = {name: value for name, value in body.items() if name not in OWNED}
    metadata = clean.get("metadata")
    if isinstance(metadata, dict) and "session_id" in metadata:
        rest = {name: value for name, value in metadata.items() if name != "session_id"}
        clean["metadata"] = rest
        if not rest:
            del clean["metadata"]
    if isinstance(clean.get("messages"), list):
        # Chat templates know no developer role, and drop such a message without a word.
        clean["messages"] = [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in clean["messages"]
        ]
    return clean


def for_worker(
    body: dict[str, Any], model: str, tenant: str, extra_key: str | None
) -> dict[str, Any]:
    out = {**body, "model": model, "cache_salt": tenant}
    if extra_key is not None:
        out["extra_key"] = extra_key
    if out.get("stream") is True:
        # Usage confirms a transfer, so it is always asked for; the relay takes the
        # usage chunk out again when the client did not ask.
        out["stream_options"] = {**(out.get("stream_options") or {}), "include_usage": True}
    return out


def headers(incoming: Mapping[str, str], request_id: str) -> dict[str, str]:
    out = {"content-type": "application/json", "x-request-id": request_id}
    out.update({name: incoming[name] for name in _TRACE_HEADERS if name in incoming})
    return out
