"""Bounds a request's headers, its body, and the time its body may take."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError
from router.metrics import Metrics
from router.settings import Limits, Timeouts


class LimitsMiddleware:
    def __init__(self, app: ASGIApp, limits: Limits, timeouts: Timeouts, metrics: Metrics) -> None:
        self.app = app
        self.limits = limits
        self.seconds = timeouts.body_seconds
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self.limits.header_bytes:
            raise self._refused(431, "The request's headers are too large.", "headers")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        read = 0
        whole = False
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def bounded() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._refused(408, "The body did not arrive in time.", "slow_body") from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if read > self.limits.body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        text = f"The body is larger than {self.limits.body_bytes} bytes."
        return self._refused(413, text, "body_too_large")

    def _refused(self, status: int, message: str, reason: str) -> ApiError:
        self.metrics.rejected.labels(reason).inc()
        # The rest of the body is not read, so the connection cannot be used again.
        return ApiError(status, message, code=reason, headers={"connection": "close"})
