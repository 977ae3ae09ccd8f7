"""Lets a request under /v1 or /admin through only with a key, and says whose it is."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.keys import OPEN, Keys, Principal
from router.errors import ApiError


class AuthMiddleware:
    """Sets scope["state"]["principal"]. Without a key file everyone is the default tenant."""

    def __init__(self, app: ASGIApp, keys: Keys | None, admin_key: str | None) -> None:
        self.app = app
        self.keys = keys
        self.admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            try:
                if path.startswith("/v1/") or path == "/v1":
                    scope.setdefault("state", {})["principal"] = self._principal(
                        Headers(scope=scope)
                    )
                elif path.startswith("/admin"):
                    self._admin(Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _principal(self, headers: Headers) -> Principal:
        if self.keys is None:
            return OPEN
        principal = self.keys.authenticate(_bearer(headers))
        if principal is None:
            raise ApiError(
                401,
                "Incorrect API key provided.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return principal

    def _admin(self, headers: Headers) -> None:
        if self.admin_key is None:
            raise ApiError(403, "No admin key is configured, so there is no admin API.")
        if not hmac.compare_digest(_bearer(headers).encode(), self.admin_key.encode()):
            raise ApiError(401, "Incorrect admin key provided.", code="invalid_api_key")


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
