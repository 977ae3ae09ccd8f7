"""A scripted stand-in for the mapper."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.fakes.pages import PAGE, PageStore, pages


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
