"""Writes an answer to the client: the worker's bytes, and errors framed where they must be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Send

from router import errors
from router.relay.logprobs import Strip
from router.relay.parser import Kind
from router.turns.upstream import Upstream


class ClientGone(Exception):
    """The client left, or reads nothing any more."""


class Writer:
    def __init__(self, send: Send, headers: Mapping[str, str], seconds: float) -> None:
        self._send = send
        self._headers = headers
        self._seconds = seconds
        self.started = False

    async def whole(self, body: bytes) -> None:
        await self._start("application/json", {"content-length": str(len(body))})
        await self._write(body, more=False)

    async def start_stream(self) -> None:
        await self._start(
            "text/event-stream; charset=utf-8",
            # For proxies in front, which would hold a stream back to buffer it.
            {"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def write(self, body: bytes) -> None:
        await self._write(body, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def error(self, message: str, code: str) -> None:
        await self._write(errors.sse(message, code=code), more=False)

    async def _start(self, media_type: str, extra: Mapping[str, str]) -> None:
        self.started = True
        headers = {"content-type": media_type, **self._headers, **extra}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


async def stream(
    upstream: Upstream,
    writer: Writer,
    with_usage: bool,
    complete: Callable[[], Awaitable[None]],
    strip: Strip | None = None,
) -> None:
    """Relays event by event, unchanged unless `strip` is given. Raises BrokenStream.

    `complete` runs before the end of the stream is passed on, so that the session's state
    is there when the client sends its next turn.
    """
    await writer.start_stream()
    events = upstream.first
    while events is not None:
        out: list[bytes] = []
        for kind, event in events:
            if kind is Kind.USAGE and not with_usage:
                continue
            if kind is Kind.GARBAGE:
                await _flush(writer, out)
                raise upstream.garbage()
            if kind is Kind.DONE:
                await _flush(writer, out)
                upstream.finish()
                await complete()
            if strip is not None and kind is Kind.CONTENT:
                event = strip.event(event)
            out.append(event)
            if kind is Kind.ERROR:
                # The worker's own words; nothing may follow them.
                await _flush(writer, out)
                raise upstream.error_event()
        await _flush(writer, out)
        if upstream.answer.done:
            break
        events = await upstream.read()
    await complete()
    await writer.end()


async def _flush(writer: Writer, out: list[bytes]) -> None:
    if out:
        await writer.write(b"".join(out))
        out.clear()
