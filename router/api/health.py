"""GET /health, /ready and /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.gateway import Gateway

_MAPPER_SECONDS = 1.0


async def health(request: Request) -> Response:
    """The process is alive."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether traffic should come here, and what is missing."""
    gateway: Gateway = request.app.state.gateway
    tiers = {tier: bool(gateway.pool.available(tier)) for tier in gateway.pool.models}
    # Both at once: a probe has little time, and both may hang.
    store_up, mapper_up = await asyncio.gather(gateway.store.ping(), _mapper_up(gateway))
    missing = [f"{tier} tier" for tier, up in tiers.items() if not up]
    missing += [] if store_up else ["session store"]
    missing += ["mapper"] if mapper_up is False else []
    if gateway.draining:
        status = "draining"
    elif not any(tiers.values()):
        status = "unavailable"
    else:
        status = "degraded" if missing else "ready"
    body: dict[str, Any] = {
        "status": status,
        "missing": missing,
        "workers": {
            worker.name: {
                "tier": worker.tier,
                "healthy": worker.healthy and worker.checked,
                "breaker": worker.breaker.state,
            }
            for worker in gateway.pool.workers
        },
        # A policy whose file is bad goes on as it last was, and traffic may come.
        "policies": {
            name: {"version": version, "stale": name in gateway.policies.errors}
            for name, version in gateway.policies.versions().items()
        },
        "session_store": "up" if store_up else "down",
        "mapper": {True: "up", False: "down", None: "none"}[mapper_up],
    }
    return JSONResponse(body, 200 if status in ("ready", "degraded") else 503)


async def _mapper_up(gateway: Gateway) -> bool | None:
    """None where there is no mapper."""
    mapper = gateway.transfers.client
    return await mapper.healthy(_MAPPER_SECONDS) if mapper is not None else None


async def metrics(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    gateway.observe()
    return Response(gateway.metrics.render(), media_type=CONTENT_TYPE_LATEST)
