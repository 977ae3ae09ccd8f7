"""The operators' API, behind its own key: sessions of a tenant, what they run on, and repairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from router.auth.keys import OPEN
from router.errors import ApiError
from router.gateway import Gateway
from router.sessions import lineage, record
from router.sessions.base import POSITIONS, DriftTotals, Session, StoreDown, TurnRecord
from router.settings import Tier

_LIMIT = 50
MOST = 500


class Summary(BaseModel):
    """One session in a list. `drift` is what its present model's lossy lineage has gathered."""

    id: str
    updated: float
    turns: int
    tier: Tier | None
    model: str | None
    kv: Literal["none", "exact", "lossy"]
    drift: float
    switches_up: int
    switches_down: int
    mapped_tokens: int
    seconds_saved: float
    seconds_lost: float


class SessionList(BaseModel):
    """Latest first; `next` is the `before` of the next page."""

    sessions: list[Summary]
    next: float | None


class LineageView(BaseModel):
    """One model's KV. `confirmed` is false when its worker has started anew since."""

    kv: Literal["none", "exact", "lossy"]
    exact_tokens: int
    lossy_tokens: int
    mapped_tokens: int
    epoch: str | None
    ahead: bool
    drift: float
    confirmed: bool
    reanchored: bool


class DriftView(BaseModel):
    """Measured drift in one direction, in nats per token, also by part of the answer."""

    audited_turns: int
    tokens: int
    nats_per_token: float
    by_position: dict[str, float]


class Detail(Summary):
    revision: int
    prompt_tokens: int
    completion_tokens: int
    lineages: dict[str, LineageView]
    measured: dict[str, DriftView]
    timeline: list[TurnRecord]


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def _told(handler: Handler) -> Handler:
    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except StoreDown:
            headers = {"retry-after": "1"}
            raise ApiError(503, "The session store cannot be reached.", headers=headers) from None

    return call


@_told
async def list_sessions(request: Request) -> Response:
    store, tenant = _gateway(request).store, _tenant(request)
    limit = _number(request, "limit", _LIMIT, int)
    before = _number(request, "before", None, float)
    if not 1 <= limit <= MOST:
        raise ApiError(400, f"limit is from 1 to {MOST}.", param="limit")
    if before is not None and not math.isfinite(before):
        raise ApiError(400, "before is a unix time.", param="before")
    found = await store.recent(tenant, limit, before)
    sessions = [await store.get(tenant, id) for id, _ in found]
    more = found[-1][1] if len(found) == limit else None
    # Those that have expired since they were listed are left out.
    return _json(SessionList(sessions=[summary(one) for one in sessions if one], next=more))


@_told
async def get_session(request: Request) -> Response:
    gateway = _gateway(request)
    session = await gateway.store.get(_tenant(request), request.path_params["session"])
    return _json(detail(gateway, _found(session)))


@_told
async def delete_session(request: Request) -> Response:
    gateway, tenant, id = _gateway(request), _tenant(request), request.path_params["session"]
    gateway.drift.forget(tenant, id)
    if not await gateway.store.delete(tenant, id):
        _found(None)
    return Response(status_code=204)


@_told
async def reanchor(request: Request) -> Response:
    """Gives up the session's lossy lineages: each model's next turn is prefilled exactly."""
    gateway, tenant, id = _gateway(request), _tenant(request), request.path_params["session"]
    gateway.drift.reanchor(tenant, id)
    session = _found(await gateway.store.amend(tenant, id, record.abandon))
    return _json(detail(gateway, session))


def summary(session: Session) -> Summary:
    mine = session.lineage(session.model)
    fields = session.model_dump(include=set(Summary.model_fields) - {"kv", "drift"})
    return Summary(**fields, kv=mine.status, drift=mine.drift)


def detail(gateway: Gateway, session: Session) -> Detail:
    return Detail(
        **summary(session).model_dump(),
        revision=session.revision,
        prompt_tokens=session.prompt_tokens,
        completion_tokens=session.completion_tokens,
        lineages={
            model: _lineage(_as_known(gateway, session, model)) for model in session.lineages
        },
        measured={direction: _drift(total) for direction, total in session.drift.items()},
        timeline=session.timeline,
    )


def _as_known(gateway: Gateway, session: Session, model: str) -> lineage.Lineage:
    """The lineage, unconfirmed if none of the model's workers has run since its last turn."""
    mine = session.lineage(model)
    last = max((turn.at for turn in session.timeline if turn.model == model), default=0.0)
    workers = [worker for worker in gateway.pool.workers if worker.model == model]
    if workers and all(worker.up_since > last for worker in workers):
        return lineage.restarted(mine)
    return mine


def _lineage(mine: lineage.Lineage) -> LineageView:
    lossy = mine.lossy
    return LineageView(
        kv=mine.status,
        exact_tokens=mine.exact,
        lossy_tokens=lossy.tokens if lossy else 0,
        mapped_tokens=lossy.mapped if lossy else 0,
        epoch=mine.epoch,
        ahead=lossy.ahead if lossy else False,
        drift=mine.drift,
        confirmed=mine.confirmed,
        reanchored=mine.anchored,
    )


def _drift(total: DriftTotals) -> DriftView:
    parts = zip((0, *POSITIONS), total.position_nats, total.position_tokens, strict=True)
    return DriftView(
        audited_turns=total.turns,
        tokens=total.tokens,
        nats_per_token=total.nats / total.tokens,
        by_position={str(first): nats / tokens for first, nats, tokens in parts if tokens},
    )


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _tenant(request: Request) -> str:
    return request.query_params.get("tenant", OPEN.tenant)


def _number(request: Request, name: str, default: Any, kind: Callable[[str], Any]) -> Any:
    value = request.query_params.get(name)
    try:
        return default if value is None else kind(value)
    except ValueError:
        raise ApiError(400, f"{name} is a number.", param=name) from None


def _found(session: Session | None) -> Session:
    if session is None:
        raise ApiError(404, "There is no such session.")
    return session


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
