"""Reads what the gateway needs out of an answer and never fails on what it does not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from router.relay import sse
from router.relay.logprobs import Confidence


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # None when the worker does not say; a hit of zero may be reported as absent too.
    cached_tokens: int | None = None


@dataclass
class Choice:
    """One answer as it grows, enough to recognise it in the next turn's history."""

    content: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self.tool_calls.items())
        ]
        return {"role": "assistant", "content": "".join(self.content), "tool_calls": calls}


class Kind(Enum):
    CONTENT = "content"
    USAGE = "usage"
    ERROR = "error"
    DONE = "done"
    # Comments, named events and the like: relayed, not understood.
    OTHER = "other"
    GARBAGE = "garbage"


class Answer:
    """Grows event by event (streams) or is read at once (`read_body`)."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.choices: dict[int, Choice] = {}
        self.content_events = 0
        self.confidence = Confidence()
        self.error: dict[str, Any] | None = None
        self.done = False

    @property
    def finished(self) -> bool:
        """Every answer begun has a finish reason, so that only the end mark can be missing."""
        return bool(self.choices) and all(c.finish_reason for c in self.choices.values())

    def read_event(self, event: bytes) -> Kind:
        payload = sse.data(event)
        if payload is None:
            return Kind.OTHER
        if payload.strip() == b"[DONE]":
            self.done = True
            return Kind.DONE
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return Kind.GARBAGE
        if not isinstance(chunk, dict):
            return Kind.OTHER
        if isinstance(chunk.get("error"), dict):
            self.error = chunk["error"]
            return Kind.ERROR
        usage = self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            return Kind.OTHER
        for choice in choices:
            self._read_delta(choice)
        if not choices:
            # A chunk that carries more than usage belongs to the client in any case.
            return Kind.USAGE if usage and "sglext" not in chunk else Kind.OTHER
        return Kind.CONTENT

    def read_body(self, body: bytes) -> Kind:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            return Kind.GARBAGE
        if not isinstance(data, dict):
            return Kind.GARBAGE
        if isinstance(data.get("error"), dict):
            self.error = data["error"]
            return Kind.ERROR
        self._read_usage(data.get("usage"))
        choices = data.get("choices")
        for item in choices if isinstance(choices, list) else []:
            if isinstance(item, dict):
                self._read_delta({**item, "delta": item.get("message")})
        self.done = True
        return Kind.CONTENT

    def _read_usage(self, usage: Any) -> bool:
        if not isinstance(usage, dict):
            return False
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.usage = Usage(
            _count(usage.get("prompt_tokens")) or 0,
            _count(usage.get("completion_tokens")) or 0,
            _count(cached),
        )
        return True

    def _read_delta(self, item: Any) -> None:
        if not isinstance(item, dict):
            return
        choice = self.choices.setdefault(_count(item.get("index")) or 0, Choice())
        if isinstance(item.get("finish_reason"), str):
            choice.finish_reason = item["finish_reason"]
        if item.get("logprobs") is not None:
            self.confidence.read(item["logprobs"])
        delta = item.get("delta")
        if not isinstance(delta, dict):
            return
        if isinstance(delta.get("content"), str):
            choice.content.append(delta["content"])
            self.content_events += bool(delta["content"])
        calls = delta.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else []):
            if isinstance(call, dict):
                self.content_events += 1
                self._read_call(choice, position, call)

    @staticmethod
    def _read_call(choice: Choice, position: int, call: dict[str, Any]) -> None:
        index = _count(call.get("index"))
        seen = choice.tool_calls.setdefault(
            position if index is None else index, {"id": "", "name": "", "arguments": ""}
        )
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        if isinstance(call.get("id"), str):
            seen["id"] = call["id"]
        if isinstance(function.get("name"), str):
            seen["name"] += function["name"]
        if isinstance(function.get("arguments"), str):
            seen["arguments"] += function["arguments"]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
