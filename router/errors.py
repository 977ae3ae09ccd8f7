"""Errors as the OpenAI API words them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.responses import Response

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def type_for(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


class ApiError(Exception):
    """An answer other than success, raised anywhere before the response has started."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or type_for(status)
        self.headers = headers or {}

    def body(self) -> bytes:
        return body(self.message, self.type, self.param, self.code)

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def body(message: str, type: str, param: str | None = None, code: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def sse(message: str, type: str = "server_error", code: str | None = None) -> bytes:
    """The error as a stream's last event, for failures after the headers have gone."""
    return b"data: " + body(message, type, None, code) + b"\n\n"


# SGLang reports a validation failure as the text of a list of pydantic errors.
_LOC = re.compile(r"'loc': \('body', '([A-Za-z0-9_]+)'")


def from_worker(status: int, payload: bytes) -> ApiError:
    """A worker's own error, flat or nested or not JSON at all, in the OpenAI shape."""
    message, param, code, kind = "", None, None, None
    try:
        data: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        data = None
    if isinstance(data, dict):
        inner = data.get("error", data)
        if isinstance(inner, dict):
            message = _text(inner.get("message")) or _text(inner.get("detail")) or ""
            param = _text(inner.get("param"))
            code = inner.get("code") if isinstance(inner.get("code"), str) else None
            kind = _text(inner.get("type"))
        elif isinstance(inner, str):
            message = inner
    if not message:
        message = f"The worker answered with status {status}."
    if param is None and (found := _LOC.search(message)):
        param = found.group(1)
    # OpenAI's own type words are kept; a worker's class names and numbers are not.
    if kind is None or not kind.endswith("_error"):
        kind = type_for(status)
    return ApiError(status, message, param=param, code=code, type=kind)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
