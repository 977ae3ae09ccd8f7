"""The mapper over HTTP, on loopback or a unix socket."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, Field

Count = Annotated[int, Field(ge=0)]


class Namespace(BaseModel):
    model: str
    extra_key: str | None
    cache_salt: str | None


class TransferRequest(BaseModel):
    session: str
    token_ids: list[int]
    deadline_ms: int
    native_tail: int | None
    min_mapped_tokens: int
    # Gives way to every other transfer, and stops when the connection is closed.
    background: bool = False
    source: Namespace
    target: Namespace


class TransferAnswer(BaseModel):
    status: Literal["applied", "fallback_reprefill", "unsupported"]
    reason: str
    pages: Count = 0
    tokens: Count = 0
    exact_tokens: Count = 0
    mapped_tokens: Count = 0
    reused_tokens: Count = 0
    ms: float = 0.0
    pair: str = "unknown"
    field: str | None = None


class MapperClient:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        socket = parts.path if parts.scheme == "unix" else None
        self._client = httpx.AsyncClient(
            base_url="http://mapper" if socket else url,
            transport=httpx.AsyncHTTPTransport(
                uds=socket,
                limits=httpx.Limits(
                    max_connections=64, max_keepalive_connections=8, keepalive_expiry=4.0
                ),
            ),
            trust_env=False,
        )

    async def transfer(self, request: TransferRequest, timeout: float) -> TransferAnswer:
        response = await self._client.post(
            "/v1/transfers",
            # A mapper of an earlier version knows nothing of it.
            content=request.model_dump_json(exclude=None if request.background else {"background"}),
            headers={"content-type": "application/json"},
            timeout=timeout,
        )
        response.raise_for_status()
        return TransferAnswer.model_validate_json(response.content)

    async def pairs(self, timeout: float) -> list[Any]:
        response = await self._client.get("/v1/pairs", timeout=timeout)
        response.raise_for_status()
        return list(response.json())

    async def healthy(self, timeout: float) -> bool:
        try:
            response = await self._client.get("/health", timeout=timeout)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def close(self) -> None:
        await self._client.aclose()
