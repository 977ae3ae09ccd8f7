"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api import admin, health, models, openapi, turns
from router.auth.middleware import AuthMiddleware
from router.errors import ApiError
from router.gateway import Gateway
from router.middleware.context import ContextMiddleware
from router.middleware.limits import LimitsMiddleware
from router.settings import Settings
from router.workers.worker import CHAT, COMPLETIONS

SESSIONS = "/admin/sessions"
SESSION = "/admin/sessions/{session:path}"
REANCHOR = "/admin/sessions/{session:path}/reanchor"


def create_app(settings: Settings) -> Starlette:
    gateway = Gateway(settings)
    app = Starlette(
        routes=[
            Route(CHAT, turns.answer, methods=["POST"]),
            Route(COMPLETIONS, turns.answer, methods=["POST"]),
            Route("/v1/models", models.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
            Route("/health", health.health, methods=["GET"]),
            Route("/ready", health.ready, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
            Route("/openapi.json", openapi.serve, methods=["GET"]),
            Route(SESSIONS, admin.list_sessions, methods=["GET"]),
            Route(REANCHOR, admin.reanchor, methods=["POST"]),
            Route(SESSION, admin.get_session, methods=["GET"]),
            Route(SESSION, admin.delete_session, methods=["DELETE"]),
        ],
        middleware=_middleware(gateway),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def _middleware(gateway: Gateway) -> list[Middleware]:
    settings = gateway.settings
    return [
        Middleware(ContextMiddleware, metrics=gateway.metrics),
        # Outside of authentication: a browser's preflight carries no key.
        Middleware(CORSMiddleware, **_cors(settings)),
        Middleware(
            LimitsMiddleware,
            limits=settings.limits,
            timeouts=settings.timeouts,
            metrics=gateway.metrics,
        ),
        Middleware(AuthMiddleware, keys=gateway.keys, admin_key=gateway.admin_key),
    ]


def _cors(settings: Settings) -> dict[str, object]:
    origins = settings.auth.cors_origins
    allowed: dict[str, object] = {"allow_origins": origins or []}
    if origins is None and settings.auth.keys_file is not None:
        allowed = {"allow_origins": ["*"]}
    elif origins is None:
        # An open gateway must not answer whatever web site its user happens to visit.
        allowed = {"allow_origin_regex": r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"}
    return {
        **allowed,
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
        "expose_headers": [
            "x-request-id", "x-baton-tier", "x-baton-reason", "x-baton-kv",
            "x-baton-kv-tokens", "x-baton-kv-reason", "x-baton-session", "x-baton-cascade",
            "x-baton-explain", "retry-after",
        ],
    }  # fmt: skip


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    await gateway.start()
    try:
        yield
    finally:
        await gateway.stop()


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """What the framework itself answers: unknown routes and methods."""
    message = {
        404: f"There is no {request.method} {request.url.path}.",
        405: f"{request.method} is not allowed here.",
    }.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response()
