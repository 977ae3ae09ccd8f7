"""The gate: limits, queue, fairness, and nothing lost when waiters leave."""

import asyncio

import pytest

from router.admission.gate import Gate
from router.errors import ApiError
from router.metrics import Metrics


def gate(limit=2, per_tenant=99, queue=4, seconds=5.0):
    return Gate("small", limit, per_tenant, queue, seconds, Metrics())


class Visitor:
    def __init__(self, gate, tenant, order=None):
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.tenant = tenant
        self.order = order
        self.task = asyncio.create_task(self._visit(gate))

    async def _visit(self, gate):
        async with gate.enter(self.tenant):
            if self.order is not None:
                self.order.append(self.tenant)
            self.inside.set()
            await self.leave.wait()

    async def go(self):
        self.leave.set()
        await self.task


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_limit_and_queue():
    door = gate(limit=1, queue=1)
    first = Visitor(door, "a")
    await first.inside.wait()
    second = Visitor(door, "a")
    await settle()
    assert (door.in_flight, door.queued) == (1, 1)
    with pytest.raises(ApiError) as error:
        async with door.enter("a"):
            pass
    assert error.value.status == 429
    assert error.value.headers["retry-after"]
    await first.go()
    await second.inside.wait()
    await second.go()
    assert (door.in_flight, door.queued) == (0, 0)


async def test_waiting_has_an_end():
    door = gate(limit=1, seconds=0.05)
    first = Visitor(door, "a")
    await first.inside.wait()
    with pytest.raises(ApiError) as error:
        async with door.enter("a"):
            pass
    assert error.value.code == "queue_timeout"
    await first.go()
    assert (door.in_flight, door.queued) == (0, 0)


async def test_tenants_take_turns():
    door = gate(limit=1, queue=20)
    order = []
    visitors = [Visitor(door, tenant, order) for tenant in "aaaaabb"]
    await settle()
    assert door.queued == 6
    for visitor in visitors:
        visitor.leave.set()
    await asyncio.gather(*(visitor.task for visitor in visitors))
    # The first is in already; b then has its turns between those of a.
    assert "".join(order) == "aababaa"


async def test_one_tenants_limit_does_not_hold_up_another():
    door = gate(limit=4, per_tenant=1, queue=8)
    first = Visitor(door, "a")
    waiting = Visitor(door, "a")
    await settle()
    other = Visitor(door, "b")
    await asyncio.wait_for(other.inside.wait(), 1)
    assert not waiting.inside.is_set()
    await first.go()
    await waiting.inside.wait()
    await waiting.go()
    await other.go()
    assert door.in_flight == 0


async def test_a_full_queue_makes_room_for_a_tenant_with_less_in_it():
    door = gate(limit=1, queue=3)
    first = Visitor(door, "a")
    await first.inside.wait()
    waiting = [Visitor(door, "a") for _ in range(3)]
    await settle()
    other = Visitor(door, "b")
    await settle()
    assert door.queued == 3
    refused = [visitor for visitor in waiting if visitor.task.done()]
    assert refused == waiting[-1:]
    with pytest.raises(ApiError):
        await refused[0].task
    for visitor in [first, *waiting[:-1], other]:
        visitor.leave.set()
    await asyncio.gather(first.task, other.task, *(v.task for v in waiting[:-1]))
    assert (door.in_flight, door.queued) == (0, 0)


async def test_a_visitor_that_leaves_the_queue_takes_no_slot():
    door = gate(limit=1, queue=4)
    first = Visitor(door, "a")
    await first.inside.wait()
    leaving, staying = Visitor(door, "a"), Visitor(door, "b")
    await settle()
    leaving.task.cancel()
    await settle()
    assert door.queued == 1
    await first.go()
    await staying.inside.wait()
    await staying.go()
    assert door.in_flight == 0


async def test_cancelled_at_the_moment_of_admission():
    door = gate(limit=1, queue=4)
    first = Visitor(door, "a")
    await first.inside.wait()
    second, third = Visitor(door, "a"), Visitor(door, "a")
    await settle()
    first.leave.set()
    # The slot is handed over and its new owner is cancelled before it runs.
    while door.queued == 2:
        await asyncio.sleep(0)
    second.task.cancel()
    await asyncio.wait_for(third.inside.wait(), 1)
    await third.go()
    await asyncio.gather(first.task, second.task, return_exceptions=True)
    assert (door.in_flight, door.queued) == (0, 0)
