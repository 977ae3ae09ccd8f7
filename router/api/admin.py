"""The operators' API, behind its own key: sessions as they are stored."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.errors import ApiError
from router.gateway import Gateway
from router.sessions.base import StoreDown


async def get_session(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    try:
        session = await gateway.store.get(*_names(request))
    except StoreDown:
        raise _down() from None
    if session is None:
        raise ApiError(404, "There is no such session.")
    return Response(session.model_dump_json(), media_type="application/json")


async def delete_session(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    try:
        found = await gateway.store.delete(*_names(request))
    except StoreDown:
        raise _down() from None
    if not found:
        raise ApiError(404, "There is no such session.")
    return Response(status_code=204)


def _names(request: Request) -> tuple[str, str]:
    return request.path_params["tenant"], request.path_params["session"]


def _down() -> ApiError:
    return ApiError(503, "The session store cannot be reached.", headers={"retry-after": "1"})
