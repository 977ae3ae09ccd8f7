"""A scripted stand-in for an SGLang worker, for faults and load.

It tokenizes by words, keeps a prefix cache per (model, extra_key, cache_salt) in pages, takes
time for uncached tokens, and misbehaves on demand. Runs in threads of a test, or as the fleet
of a load test.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.answer import Answer
from tests.fakes.faults import Fault, error_event, failure, random_fault
from tests.fakes.pages import PAGE, PageStore, pages, tokenize


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
    # What audits asked for, and which of it they gave up; how long a request of theirs takes at
    # least, how far lossy KV is off, and the status of an audit's failure.
    probes: list[dict[str, Any]] = field(default_factory=list)
    aborted_probes: list[dict[str, Any]] = field(default_factory=list)
    probe_seconds: Callable[[dict[str, Any]], float] = lambda body: 0.0
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
        start = body.get("logprob_start_len")
        ids = body["input_ids"] if "input_ids" in body else list(body["text"].encode())
        namespace = (self.model, body.get("extra_key"), body.get("cache_salt"))
        readable = ids if start is None else ids[:start]
        cached = PAGE * self.store.prefix(namespace, pages(readable))
        seconds = self.probe_seconds(body) + self.seconds_per_token * (len(ids) - cached)
        seen = Seen(request.url.path, body, dict(request.headers))
        if seconds and not await self._busy(request, seen, seconds):
            self.aborted_probes.append(body)
            return Response(status_code=499)
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
        fault = self.faults.popleft() if self.faults else random_fault(self.fault_rate)
        if fault is not None:
            self.faulted.setdefault(seen.headers.get("x-request-id", ""), []).append(fault.kind)
            if fault.kind == "hang" and not await self._busy(request, seen, fault.seconds):
                return Response(status_code=499)
            if (response := failure(fault, streamed=bool(body.get("stream")))) is not None:
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
                        yield error_event("Out of memory", 500)
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
