"""What a readiness probe waits for."""

import asyncio
from types import SimpleNamespace

import orjson

from router.api import health


async def test_store_and_mapper_are_asked_at_once():
    both = asyncio.Barrier(2)

    async def answer(*_):
        await asyncio.wait_for(both.wait(), 10)
        return True

    worker = SimpleNamespace(
        name="w",
        tier="small",
        healthy=True,
        checked=True,
        breaker=SimpleNamespace(state="closed"),
    )
    gateway = SimpleNamespace(
        draining=False,
        store=SimpleNamespace(ping=answer),
        transfers=SimpleNamespace(client=SimpleNamespace(healthy=answer)),
        pool=SimpleNamespace(
            models={"small": "m"}, workers=[worker], available=lambda tier: [worker]
        ),
        policies=SimpleNamespace(errors={}, versions=lambda: {"default": "v"}),
    )
    state = SimpleNamespace(gateway=gateway)
    response = await health.ready(SimpleNamespace(app=SimpleNamespace(state=state)))
    assert response.status_code == 200
    assert orjson.loads(response.body)["status"] == "ready"
