"""GET /v1/models and /v1/models/{id}: the aliases and the models behind them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.errors import ApiError
from router.gateway import Gateway
from router.settings import ALIASES


async def list_models(request: Request) -> Response:
    data = [_model(name) for name in _visible(request)]
    return JSONResponse({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    name = request.path_params["model"]
    if name not in _visible(request):
        raise ApiError(
            404, f"The model {name!r} does not exist.", param="model", code="model_not_found"
        )
    return JSONResponse(_model(name))


def _visible(request: Request) -> list[str]:
    gateway: Gateway = request.app.state.gateway
    tiers = gateway.pool.models
    aliases = [name for name in ALIASES if name == "auto" or name in tiers]
    names = [*aliases, *tiers.values()]
    return [name for name in names if request.state.principal.may_use_model(name)]


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "baton"}
