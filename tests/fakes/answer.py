"""What the fake worker says: an echo, a tool call, or an object of a schema, whole or as events."""

from __future__ import annotations

import json
import math
import time
from typing import Any


class Answer:
    """What the model says: an echo, a tool call, or an object of the schema asked for."""

    def __init__(self, body: dict, messages: list[dict], prompt_tokens: int, chat: bool) -> None:
        self.body = body
        self.chat = chat
        self.prompt_tokens = prompt_tokens
        self.cached = 0
        self.id = f"chatcmpl-{time.time_ns():x}"
        last = messages[-1].get("content") or ""
        if isinstance(last, list):
            last = "".join((part.get("text") or "") for part in last)
        text = f"Turn {len(messages)}: you said — „{last[:200]}“ ✓"
        response_format = body.get("response_format") or {}
        if response_format.get("type") == "json_schema":
            text = json.dumps(_example(response_format["json_schema"]["schema"]))
        stops = body.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 10_000
        words = text.split(" ")
        self.words = [w if i == 0 else " " + w for i, w in enumerate(words[:limit])]
        self.finish = "length" if len(words) > limit else "stop"
        self.calls: list[dict] = []
        if chat and body.get("tools") and messages[-1]["role"] == "user":
            name = body["tools"][0]["function"]["name"]
            self.calls = [{"name": name, "arguments": '{"city": "Paris"}', "id": "call_1"}]
            self.words, self.finish = [], "tool_calls"
        self.n = body.get("n") or 1
        self.logprob = -0.5
        self.opinion: dict[str, float] = {}

    def usage(self) -> dict[str, Any]:
        completion = self.n * (len(self.words) or 5)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached} if self.cached else None,
        }

    def _base(self, kind: str) -> dict[str, Any]:
        model = self.body.get("model")
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": model}

    def _logprobs(self, word: str) -> dict | None:
        if not self.body.get("logprobs"):
            return None
        top = [
            {"token": f"{word}{rank}", "logprob": -float(rank), "bytes": None}
            for rank in range(self.body.get("top_logprobs") or 0)
        ]
        if self.opinion and self.body.get("max_tokens") == 1:
            top = [
                {"token": token, "logprob": math.log(chance), "bytes": None}
                for token, chance in self.opinion.items()
            ]
        entry = {
            "token": word,
            "logprob": self.logprob,
            "bytes": list(word.encode()),
            "top_logprobs": top,
        }
        return {"content": [entry]}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.words)
        choices = []
        for index in range(self.n):
            if not self.chat:
                choices.append({"index": index, "text": text, "finish_reason": self.finish})
                continue
            message: dict[str, Any] = {"role": "assistant", "content": text or None}
            if self.calls:
                message["tool_calls"] = [
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": call["name"], "arguments": call["arguments"]},
                    }
                    for call in self.calls
                ]
            entries = [e for w in self.words if (p := self._logprobs(w)) for e in p["content"]]
            logprobs = {"content": entries} if entries else None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": self.finish,
                }
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._base(kind), "choices": choices, "usage": self.usage()}

    def _event(self, choices: list[dict], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        chunk = {**self._base(kind), "choices": choices, **more}
        if (self.body.get("stream_options") or {}).get("continuous_usage_stats"):
            chunk.setdefault("usage", self.usage())
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _delta(self, index: int, delta: dict, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
        if not self.chat:
            choice = {"index": index, "text": delta.get("content", ""), "finish_reason": finish}
        return self._event([choice])

    def events(self) -> Any:
        for index in range(self.n):
            yield self._delta(index, {"role": "assistant", "content": ""})
        for word in self.words:
            for index in range(self.n):
                yield self._delta(index, {"content": word}, logprobs=self._logprobs(word))
        for position, call in enumerate(self.calls):
            half = len(call["arguments"]) // 2
            function = {"name": call["name"], "arguments": ""}
            head = {"index": position, "id": call["id"], "type": "function", "function": function}
            yield self._delta(0, {"tool_calls": [head]})
            for part in (call["arguments"][:half], call["arguments"][half:]):
                piece = {"index": position, "function": {"arguments": part}}
                yield self._delta(0, {"tool_calls": [piece]})
        for index in range(self.n):
            yield self._delta(index, {}, self.finish)
        options = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield self._event([], usage=self.usage())
        yield b"data: [DONE]\n\n"


def _example(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        return {name: _example(item) for name, item in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {}))]
    return {"integer": 7, "number": 1.5, "boolean": True}.get(kind, "word")
