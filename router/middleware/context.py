"""Gives each request an id, carries trace headers back, and writes its one log line."""

from __future__ import annotations

import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import log
from router.errors import ApiError
from router.metrics import Metrics
from router.turns.exchange import CLIENT_GONE
from router.turns.relay import ClientGone

logger = log.get("access")
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
# Paths become a metric label, so only those that exist are told apart.
_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics",
)  # fmt: skip
_QUIET = ("/health", "/ready", "/metrics")


class ContextMiddleware:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.match(request_id):
            request_id = f"req-{uuid.uuid4().hex}"
        trace = headers.get("traceparent", "")
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["log"] = {}
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = request_id
                if _TRACEPARENT.match(trace):
                    out["traceparent"] = trace
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except (ClientGone, ClientDisconnect):
            status = CLIENT_GONE
        except Exception as error:
            logger.exception("request_failed", request_id=request_id, error=type(error).__name__)
            if status:
                status = 500
                raise
            await ApiError(500, "Internal error.").response()(scope, receive, sending)
        finally:
            self._record(scope, request_id, status, time.monotonic() - started)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = scope["path"]
        route = path if path in _ROUTES else "other"
        self.metrics.requests.labels(route, str(status)).inc()
        if path in _QUIET and status < 500:
            return
        logger.info(
            "request",
            request_id=request_id,
            method=scope["method"],
            route=route,
            status=status,
            seconds=round(seconds, 4),
            **scope["state"]["log"],
        )
