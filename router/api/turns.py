"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api import schema
from router.errors import ApiError
from router.gateway import Gateway
from router.turns.exchange import Exchange
from router.turns.incoming import Incoming
from router.workers.worker import CHAT, COMPLETIONS

SCHEMAS: dict[str, type[schema.Sampling]] = {
    CHAT: schema.ChatRequest,
    COMPLETIONS: schema.CompletionRequest,
}


async def answer(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "The content type must be application/json.")
    path = request.scope["path"]
    body: dict[str, Any] = schema.parse(await request.body(), SCHEMAS[path])
    incoming = Incoming(
        path=path,
        body=body,
        headers=request.headers,
        principal=request.state.principal,
        request_id=request.state.request_id,
        received=time.monotonic(),
    )
    return Exchange(gateway, incoming)
