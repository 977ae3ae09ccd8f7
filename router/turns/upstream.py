"""An answer opened at a worker: its first event is in, the rest is still to come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import orjson

from router import errors
from router.errors import ApiError
from router.metrics import Metrics
from router.relay.parser import Answer, Kind
from router.relay.sse import EventTooLarge, Splitter
from router.settings import Timeouts
from router.workers.worker import UpstreamError, Worker

# How SGLang says that a page of the external KV store could not be loaded. It is the
# store's fault and not the worker's, and the same turn without mapped KV will do.
_LOAD_FAILED = "External KV cache load failed"
LOAD_FAILED = "load_failed"
_MAX_BODY = 64 * 1024 * 1024
_MAX_ERROR_BODY = 64 * 1024
# How long the end of an answer's connection may follow its last event.
_END_SECONDS = 0.5


class BrokenStream(Exception):
    """The worker failed after its answer had begun."""

    def __init__(self, reason: str, message: str, told: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = message
        # Whether the client has seen the worker's own error event already.
        self.told = told


class Upstream:
    def __init__(self, worker: Worker, metrics: Metrics, timeouts: Timeouts, stream: bool) -> None:
        self.worker = worker
        self.stream = stream
        self.answer = Answer()
        # Events already read, each with what it is; a whole answer's body is in `body`.
        self.first: list[tuple[Kind, bytes]] = []
        self.body = b""
        self.opened = time.monotonic()
        self.first_event_seconds = 0.0
        # From the first event to the last one so far.
        self.writing_seconds = 0.0
        # Whether the worker had nothing else to do for this gateway until the first event.
        self.alone = worker.in_flight == 0
        self._metrics = metrics
        self._timeouts = timeouts
        self._splitter = Splitter()
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._closed = False
        self._ended = False
        worker.enter()
        self._started = worker.started
        worker.breaker.start()

    async def open(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Sends the request and waits for the first event, or the whole answer."""
        wait = self._timeouts
        limit = wait.first_event_seconds if self.stream else wait.request_seconds
        try:
            try:
                async with asyncio.timeout(limit):
                    await self._open(path, body, headers)
            except TimeoutError:
                message = "The worker did not answer in time."
                raise UpstreamError(
                    "timeout", ApiError(504, message), elsewhere=True, trips=True
                ) from None
            except httpx.ConnectTimeout as error:
                raise _unreachable("connect_timeout") from error
            except httpx.ConnectError as error:
                raise _unreachable("refused") from error
            except httpx.HTTPError as error:
                # Also an idle connection that the worker closed as the request went out.
                raise _unreachable("reset") from error
        except UpstreamError as error:
            self._outcome(error.reason)
            if error.trips:
                self.worker.breaker.failure()
            else:
                self.worker.breaker.success()
            await self.close()
            raise
        except BaseException:
            self._outcome("abandoned")
            self.worker.breaker.abandon()
            await self.close()
            raise
        self.first_event_seconds = time.monotonic() - self.opened
        self.alone = self.alone and self.worker.started == self._started
        self.worker.breaker.success()

    async def read(self) -> list[tuple[Kind, bytes]] | None:
        """The next whole events; None at the end. Raises BrokenStream."""
        if self._ended:
            return None
        try:
            async with asyncio.timeout(self._timeouts.idle_seconds):
                chunk = await anext(self._chunks, None)
            if chunk is not None:
                return self._parse(chunk)
        except TimeoutError:
            raise self._broken("stalled", "The worker stopped answering.") from None
        except httpx.HTTPError:
            raise self._broken("died", "The worker's connection broke.") from None
        except EventTooLarge:
            raise self._broken("garbage", "The worker sent an event that is too large.") from None
        rest = self._splitter.rest
        if rest.strip():
            # A last event without its blank line is whole if it can be read.
            kind = self.answer.read_event(rest)
            if kind in (Kind.DONE, Kind.CONTENT, Kind.USAGE):
                self._splitter = Splitter()
                return [(kind, rest)]
        if not (self.answer.done or self.answer.finished):
            raise self._broken("died", "The worker's answer ended too early.")
        self._outcome("ok")
        self._ended = True
        return None

    def finish(self) -> None:
        """The end mark was seen, so what the worker still does is of no interest."""
        self._outcome("ok")

    def garbage(self) -> BrokenStream:
        return self._broken("garbage", "The worker sent an event that is not JSON.")

    def error_event(self) -> BrokenStream:
        if _status(self.answer.error) >= 500:
            self.worker.breaker.failure()
        self._outcome("error_event")
        return BrokenStream("error_event", "", told=True)

    async def close(self) -> None:
        """Also aborts the request at the worker when its answer is not over."""
        if self._closed:
            return
        self._closed = True
        self.worker.leave()
        if self._response is None:
            return
        try:
            if self.stream and self.answer.done:
                # Read to the end, so that the connection can be used again.
                with contextlib.suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(_END_SECONDS):
                        async for _ in self._chunks:
                            pass
        finally:
            await self._response.aclose()

    async def _open(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        client = self.worker.client
        request = client.build_request("POST", path, content=body, headers=headers)
        self._response = response = await client.send(request, stream=True)
        self._chunks = response.aiter_bytes()
        if response.status_code != 200:
            raise await self._refusal(response)
        if not self.stream:
            await self._read_body()
            return
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise _garbage(f"The worker answered a stream with {kind[:80] or 'no content type'!r}.")
        while not any(kind is not Kind.OTHER for kind, _ in self.first):
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise _garbage("The worker's stream was empty.", reason="empty")
            try:
                self.first += self._parse(chunk)
            except EventTooLarge:
                raise _garbage("The worker sent an event that is too large.") from None
        kind = next(kind for kind, _ in self.first if kind is not Kind.OTHER)
        if kind is Kind.GARBAGE:
            raise _garbage("The worker sent an event that is not JSON.")
        if kind is Kind.ERROR:
            raise _refused(_status(self.answer.error), orjson.dumps({"error": self.answer.error}))

    async def _read_body(self) -> None:
        self.body = await self._bounded(_MAX_BODY)
        kind = self.answer.read_body(self.body)
        if kind is Kind.GARBAGE:
            raise _garbage("The worker's answer is not a JSON object.")
        if kind is Kind.ERROR:
            raise _refused(_status(self.answer.error), self.body)
        self._outcome("ok")

    async def _refusal(self, response: httpx.Response) -> UpstreamError:
        payload = await self._bounded(_MAX_ERROR_BODY)
        retry_after = response.headers.get("retry-after")
        return _refused(response.status_code, payload, retry_after)

    async def _bounded(self, limit: int) -> bytes:
        body = bytearray()
        async for chunk in self._chunks:
            body += chunk
            if len(body) > limit:
                raise _garbage("The worker's answer is too large.")
        return bytes(body)

    def _parse(self, chunk: bytes) -> list[tuple[Kind, bytes]]:
        if self.first_event_seconds:
            self.writing_seconds = time.monotonic() - self.opened - self.first_event_seconds
        return [(self.answer.read_event(event), event) for event in self._splitter.feed(chunk)]

    def _broken(self, reason: str, message: str) -> BrokenStream:
        self._outcome(reason)
        self.worker.breaker.failure()
        return BrokenStream(reason, message)

    def _outcome(self, outcome: str) -> None:
        self._metrics.worker_requests.labels(self.worker.name, outcome).inc()


def _unreachable(reason: str) -> UpstreamError:
    error = ApiError(503, "The worker could not be reached.", headers={"retry-after": "1"})
    return UpstreamError(reason, error, again=True, trips=True)


def _garbage(message: str, reason: str = "garbage") -> UpstreamError:
    return UpstreamError(reason, ApiError(502, message), elsewhere=True, trips=True)


def _refused(status: int, payload: bytes, retry_after: str | None = None) -> UpstreamError:
    error = errors.from_worker(status, payload)
    if _LOAD_FAILED in error.message:
        return UpstreamError(LOAD_FAILED, error, elsewhere=True)
    if status in (401, 403):
        # The gateway's own credentials were refused; the client's are none of it.
        error = ApiError(502, "The worker refused the gateway's credentials.")
        return UpstreamError("credentials", error, elsewhere=True, trips=True)
    if status == 429:
        error.headers["retry-after"] = retry_after or "1"
        return UpstreamError("status_429", error, elsewhere=True)
    if 400 <= status < 500:
        return UpstreamError("status_4xx", error)
    if status < 500:
        return _garbage(f"The worker answered with status {status}.")
    if status == 503:
        error.headers["retry-after"] = retry_after or "1"
    return UpstreamError("status_5xx", error, elsewhere=True, trips=True)


def _status(error: dict[str, Any] | None) -> int:
    code = (error or {}).get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 502
