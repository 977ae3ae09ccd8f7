"""Runs a turn against an ASGI connection, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import ApiError
from router.gateway import Gateway
from router.turns.incoming import Incoming
from router.turns.relay import ClientGone
from router.turns.turn import Turn

CLIENT_GONE = 499
_TOO_LONG = (504, "The request took too long.")
_SHUTTING_DOWN = (503, "The gateway is shutting down.")


class Exchange(Response):
    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self.background = None
        self._gateway = gateway
        self._incoming = incoming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        turn = Turn(gateway, self._incoming)
        started = False

        async def sending(message: dict) -> None:
            nonlocal started
            started = True
            await send(message)

        work = asyncio.create_task(turn.run(sending))
        gone = asyncio.create_task(_disconnected(receive))
        gateway.running.add(work)
        try:
            limit = gateway.settings.timeouts.request_seconds
            await asyncio.wait({work, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            overdue = not work.done() and not gone.done()
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.result()
            elif gone.done():
                raise ClientGone
            else:
                error = _TOO_LONG if overdue else _SHUTTING_DOWN
                if not started:
                    raise ApiError(*error)
                await turn.cut(error[1])
        except ClientGone:
            await turn.abandoned()
            raise
        finally:
            gateway.running.discard(work)
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            fields = scope.setdefault("state", {}).setdefault("log", {})
            fields.update(turn.log_fields)
            turn.log_decision()
            if turn.tier is not None:
                seconds = time.monotonic() - self._incoming.received
                gateway.metrics.duration.labels(turn.tier).observe(seconds)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
