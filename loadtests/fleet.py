"""Scripted workers and a scripted mapper in a process of their own, going wrong at random.

Prints its addresses as one line of JSON and runs until its standard input is closed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fakes.mapper import FakeMapper
from tests.fakes.pages import PageStore
from tests.fakes.server import Threaded
from tests.fakes.worker import FakeWorker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault-rate", type=float, default=0.02)
    options = parser.parse_args()
    store = PageStore()
    workers = {
        f"{tier}-{number}": FakeWorker(
            f"{tier}-model",
            store,
            seconds_per_token=0.0001,
            seconds_per_word=0.02,
            fault_rate=options.fault_rate,
            keep=10,
        )
        for tier in ("small", "large")
        for number in range(2)
    }
    mapper = FakeMapper(store, delay=0.002)

    async def faults(request: Request) -> Response:
        merged: dict[str, list[str]] = {}
        for worker in workers.values():
            for request_id, kinds in worker.faulted.items():
                merged.setdefault(request_id, []).extend(kinds)
        return JSONResponse(merged)

    async def switch(request: Request) -> Response:
        """Turns all faults on or off."""
        rate = options.fault_rate if request.path_params["state"] == "on" else 0.0
        for worker in workers.values():
            worker.fault_rate = rate
        return Response()

    async def active(request: Request) -> Response:
        return JSONResponse(sum(worker.active for worker in workers.values()))

    control = Starlette(
        routes=[
            Route("/faults", faults),
            Route("/faults/{state}", switch, methods=["POST"]),
            Route("/active", active),
        ]
    )
    apps = {name: worker.app() for name, worker in workers.items()}
    servers = {
        name: Threaded(app).start()
        for name, app in {**apps, "mapper": mapper.app(), "control": control}.items()
    }
    print(json.dumps({name: server.url for name, server in servers.items()}), flush=True)
    threading.Thread(target=_moods, args=(mapper, store), daemon=True).start()
    sys.stdin.read()
    for server in servers.values():
        server.stop()


def _moods(mapper: FakeMapper, store: PageStore) -> None:
    """Now and then the mapper is slow or broken for a while, and the page store is emptied."""
    while True:
        time.sleep(random.uniform(10, 30))
        mood = random.choice(["slow", "status", "garbage", "empty"])
        if mood == "empty":
            store.namespaces.clear()
            continue
        mapper.delay = 5.0 if mood == "slow" else 0.002
        mapper.fault = None if mood == "slow" else mood
        time.sleep(random.uniform(2, 6))
        mapper.delay, mapper.fault = 0.002, None


if __name__ == "__main__":
    main()
