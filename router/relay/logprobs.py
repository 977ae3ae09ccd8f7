"""Log-probabilities that the gateway asked a worker for, and their removal from the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.relay import sse


@dataclass
class Confidence:
    """Of an answer's tokens: each one's log-probability, and its lead on the second likeliest."""

    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def read(self, logprobs: Any) -> None:
        """A choice's `logprobs`; what cannot be understood is not measured."""
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        for entry in content if isinstance(content, list) else []:
            chosen = _logprob(entry)
            if chosen is None:
                continue
            self.logprobs.append(chosen)
            top = entry.get("top_logprobs")
            ranked = sorted(
                (
                    one
                    for item in (top if isinstance(top, list) else [])
                    if (one := _logprob(item)) is not None
                ),
                reverse=True,
            )
            if len(ranked) >= 2:
                self.margins.append(chosen - ranked[1])


def _logprob(entry: Any) -> float | None:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Strip:
    """Takes out of an answer what its client did not ask for.

    `top` is how many alternatives a token the client wants, or None for no log-probabilities;
    `usage` whether it wants usage in every chunk.
    """

    top: int | None
    usage: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Strip:
        options = body.get("stream_options")
        every = isinstance(options, dict) and options.get("continuous_usage_stats") is True
        top = (body.get("top_logprobs") or 0) if body.get("logprobs") is True else None
        return cls(top, every)

    def event(self, event: bytes) -> bytes:
        payload = sse.data(event)
        chunk = orjson.loads(payload)
        self._choices(chunk)
        if not self.usage and "usage" in chunk:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def whole(self, body: bytes) -> bytes:
        answer = orjson.loads(body)
        self._choices(answer)
        return orjson.dumps(answer)

    def _choices(self, answer: dict[str, Any]) -> None:
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if not isinstance(choice, dict) or not isinstance(choice.get("logprobs"), dict):
                continue
            if self.top is None:
                choice["logprobs"] = None
                continue
            content = choice["logprobs"].get("content")
            for entry in content if isinstance(content, list) else []:
                if isinstance(entry, dict) and isinstance(entry.get("top_logprobs"), list):
                    entry["top_logprobs"] = entry["top_logprobs"][: self.top]
