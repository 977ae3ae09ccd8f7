"""A scripted stand-in for an SGLang worker and for the mapper, for faults and load.

It tokenizes by words, keeps a prefix cache per (model, extra_key, cache_salt) in pages, takes
time for uncached tokens, and misbehaves on demand. Runs in threads of a test, or as the fleet
of a load test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = 4
LOAD_FAILED = "External KV cache load failed"


def tokenize(messages: list[dict[str, Any]], opened: bool = True) -> list[int]:
    words: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = " ".join((part.get("text") or "") for part in content)
        words += [f"<{message['role']}>", *(content or "").split()]
        for call in message.get("tool_calls") or []:
            words += [call["function"]["name"], call["function"]["arguments"]]
    if opened:
        words.append("<assistant>")
    return [int.from_bytes(hashlib.md5(w.encode()).digest()[:3], "big") for w in words]


def pages(token_ids: list[int]) -> list[bytes]:
    keys, key = [], b""
    for start in range(0, len(token_ids) - len(token_ids) % PAGE, PAGE):
        key = hashlib.sha256(key + repr(token_ids[start : start + PAGE]).encode()).digest()
        keys.append(key)
    return keys


class PageStore:
    """Pages by namespace, shared by the fake workers and the fake mapper."""

    def __init__(self) -> None:
        self.namespaces: dict[tuple[str, str | None, str | None], set[bytes]] = {}

    def add(self, namespace: tuple, keys: list[bytes]) -> None:
        self.namespaces.setdefault(namespace, set()).update(keys)

    def prefix(self, namespace: tuple, keys: list[bytes]) -> int:
        known = self.namespaces.get(namespace, set())
        count = 0
        for key in keys:
            if key not in known:
                break
            count += 1
        return count


@dataclass
class Fault:
    """What goes wrong with one request. `kind` is one of the names in FakeWorker._fault."""

    kind: str
    status: int = 500
    after: int = 2
    seconds: float = 30.0
    text: str = ""


@dataclass
class Seen:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    aborted: bool = False
    finished: bool = False


@dataclass
class FakeWorker:
    model: str = "small-model"
    store: PageStore = field(default_factory=PageStore)
    seconds_per_token: float = 0.0
    seconds_per_word: float = 0.0
    # Of every token it writes; the second likeliest one is a nat below the likeliest.
    logprob: float = -0.5
    # What it says of its own answer when asked: the likelihoods of yes and no.
    opinion: dict[str, float] = field(default_factory=dict)
    # Chance that a request goes wrong by itself, for load.
    fault_rate: float = 0.0
    faults: deque[Fault] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    keep: int = 2000
    # What audits asked for, how far lossy KV is off, and the status of an audit's failure.
    probes: list[dict[str, Any]] = field(default_factory=list)
    drift: float = 0.0
    probe_fault: int | None = None
    # What went wrong by request id, so that a load test can explain what its clients saw.
    faulted: dict[str, list[str]] = field(default_factory=dict)
    active: int = 0
    healthy: bool = True
    # Exactly these bytes as a stream, cut into these pieces.
    raw: list[bytes] | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/loads", self.loads),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        tokens = tokenize(body["messages"], body.get("add_generation_prompt", True))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 8192})

    async def loads(self, request: Request) -> Response:
        return JSONResponse({"loads": [{"num_running_reqs": self.active, "num_waiting_reqs": 0}]})

    async def generate(self, request: Request) -> Response:
        """What an audit asks for: tokens on lossy KV are likelier by `drift` nats."""
        body = orjson.loads(await request.body())
        self.probes.append(body)
        if self.probe_fault is not None:
            return JSONResponse({"error": {"message": "scripted failure"}}, self.probe_fault)
        ids, start = body["input_ids"], body.get("logprob_start_len")
        namespace = (self.model, body.get("extra_key"), body.get("cache_salt"))
        readable = ids if start is None else ids[:start]
        cached = PAGE * self.store.prefix(namespace, pages(readable))
        if self.seconds_per_token:
            await self._busy(
                request, Seen("", {}, {}), self.seconds_per_token * (len(ids) - cached)
            )
        self.store.add(namespace, pages(ids))
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": cached}
        if body.get("return_logprob"):
            value = -1.0 + (self.drift if body.get("extra_key") else 0.0)
            scored = [
                [None if at == start else value, ids[at], None] for at in range(start, len(ids))
            ]
            meta["input_token_logprobs"] = scored
        return JSONResponse({"text": "x", "output_ids": [1], "meta_info": meta})

    async def completions(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else "ids"
        return await self._answer(request, body, [{"role": "user", "content": text}], chat=False)

    async def chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        return await self._answer(request, body, body["messages"], chat=True)

    async def _answer(
        self, request: Request, body: dict, messages: list[dict], chat: bool
    ) -> Response:
        seen = Seen(request.url.path, body, dict(request.headers))
        self.seen.append(seen)
        del self.seen[: -self.keep]
        fault = self.faults.popleft() if self.faults else self._by_chance()
        if fault is not None:
            self.faulted.setdefault(seen.headers.get("x-request-id", ""), []).append(fault.kind)
        if fault is not None and (response := await self._fault(request, fault, seen)) is not None:
            return response
        try:
            token_ids = tokenize(messages)
            writer = Answer(body, messages, len(token_ids), chat)
            writer.logprob, writer.opinion = self.logprob, self.opinion
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # As a real worker does with what it cannot make sense of.
            return JSONResponse({"object": "error", "message": repr(error), "code": 400}, 400)
        keys = pages(token_ids[:-1])
        namespace = (body.get("model"), body.get("extra_key"), body.get("cache_salt"))
        writer.cached = cached = PAGE * self.store.prefix(namespace, keys)
        if not await self._busy(request, seen, self.seconds_per_token * (len(token_ids) - cached)):
            return Response(status_code=499)
        self.store.add(namespace, pages(token_ids))
        if not body.get("stream"):
            if not await self._busy(request, seen, self.seconds_per_word * len(writer.words)):
                return Response(status_code=499)
            seen.finished = True
            return JSONResponse(writer.whole())
        return StreamingResponse(self._stream(writer, fault, seen), media_type="text/event-stream")

    async def _stream(self, writer: Answer, fault: Fault | None, seen: Seen) -> Any:
        self.active += 1
        try:
            if self.raw is not None:
                for piece in self.raw:
                    yield piece
                    await asyncio.sleep(0)
                seen.finished = True
                return
            for number, event in enumerate(writer.events()):
                if fault is not None and number == fault.after:
                    if fault.kind == "die":
                        raise RuntimeError("the worker dies here")
                    if fault.kind == "stall":
                        await asyncio.sleep(fault.seconds)
                    if fault.kind == "garbage_midway":
                        yield b"data: {not json\n\n"
                    if fault.kind == "error_midway":
                        yield _error_event("Out of memory", 500)
                        return
                    if fault.kind == "silent_end":
                        return
                yield event
                await asyncio.sleep(self.seconds_per_word)
            seen.finished = True
        except (asyncio.CancelledError, GeneratorExit):
            seen.aborted = True
            raise
        finally:
            self.active -= 1

    def _by_chance(self) -> Fault | None:
        if random.random() >= self.fault_rate:
            return None
        return random.choice(
            [
                Fault("status", status=500),
                Fault("status", status=503),
                Fault("status", status=429),
                Fault("die"),
                Fault("garbage"),
                Fault("error_first"),
                Fault("silent_end"),
                Fault("stall", seconds=9.0),
            ]
        )

    async def _busy(self, request: Request, seen: Seen, seconds: float) -> bool:
        """Works for so long; False when the request is aborted meanwhile."""
        self.active += 1
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                if await request.is_disconnected():
                    seen.aborted = True
                    return False
                await asyncio.sleep(min(left, 0.02))
            return True
        finally:
            self.active -= 1

    async def _fault(self, request: Request, fault: Fault, seen: Seen) -> Response | None:
        if fault.kind == "status":
            text = fault.text or "scripted failure"
            headers = {"retry-after": "7"} if fault.status == 429 else {}
            return JSONResponse(
                {
                    "object": "error",
                    "message": text,
                    "type": "BadRequest",
                    "param": None,
                    "code": fault.status,
                },
                fault.status,
                headers=headers,
            )
        if fault.kind == "garbage":
            return PlainTextResponse("<html>it works</html>")
        if fault.kind == "garbage_stream":
            return StreamingResponse(iter([b"data: {not json\n\n"]), media_type="text/event-stream")
        if fault.kind == "empty":
            return StreamingResponse(iter([b""]), media_type="text/event-stream")
        if fault.kind in ("error_first", "load_failed"):
            text = LOAD_FAILED if fault.kind == "load_failed" else "scripted failure"
            if seen.body.get("stream"):
                events = iter([_error_event(text, 503), b"data: [DONE]\n\n"])
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse({"object": "error", "message": text, "code": 503}, 503)
        if fault.kind == "hang" and not await self._busy(request, seen, fault.seconds):
            return Response(status_code=499)
        return None


def _error_event(message: str, code: int) -> bytes:
    error = {"object": "error", "message": message, "type": "Error", "param": None, "code": code}
    return f"data: {json.dumps({'error': error})}\n\n".encode()


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


@dataclass
class FakeMapper:
    """Makes source pages reachable in the target's namespace, as the real one does."""

    store: PageStore = field(default_factory=PageStore)
    delay: float = 0.0
    fault: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] | None = None
    # So many transfers come before their source's pages are written.
    early: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/transfers", self.transfer, methods=["POST"]),
                Route("/health", self.health),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def transfer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        del self.seen[:-500]
        await asyncio.sleep(self.delay)
        if self.fault == "status":
            return JSONResponse({"detail": "broken"}, 500)
        if self.fault == "garbage":
            return PlainTextResponse("not json")
        if self.answer is not None:
            return JSONResponse(self.answer)
        source, target = (
            (body[side]["model"], body[side]["extra_key"], body[side]["cache_salt"])
            for side in ("source", "target")
        )
        keys = pages(body["token_ids"][:-1])
        exact = self.store.prefix((target[0], None, target[2]), keys)
        reused = self.store.prefix(target, keys)
        have = self.store.prefix(source, keys)
        if self.early > 0:
            self.early -= 1
            have = 0
        total = max(exact, reused, have)
        base = {
            "pair": "small->large" if "large" in target[0] else "large->small",
            "ms": 1.0,
            "field": None,
        }
        if total == 0:
            counts = {name: 0 for name in ("pages", "tokens", "exact_tokens", "mapped_tokens")}
            return JSONResponse(
                {**base, **counts, "status": "fallback_reprefill", "reason": "no_source_pages",
                 "reused_tokens": 0}
            )  # fmt: skip
        mapped = max(0, total - max(exact, reused))
        if mapped or reused > exact:
            self.store.add(target, keys[:total])
        return JSONResponse(
            {
                **base,
                "status": "applied",
                "reason": "ok",
                "pages": total,
                "tokens": total * PAGE,
                "exact_tokens": exact * PAGE,
                "mapped_tokens": mapped * PAGE,
                "reused_tokens": max(0, reused - exact) * PAGE,
            }
        )


class Threaded:
    """An ASGI application on its own loop in a thread, on a loopback port."""

    def __init__(self, app: Any, port: int = 0, server: uvicorn.Server | None = None) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.server = server or uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none")
        )
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Threaded:
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.listener.close()


class RawServer:
    """Answers every request but health checks with the same bytes and closes the connection.

    `connections` are those that a turn has made: how often it was tried.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if b"/health" in request:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.connections += request.startswith(b"POST")
                connection.sendall(self.answer)

    def stop(self) -> None:
        self.listener.close()
