"""Transfers that nobody waits for make way for those that somebody does."""

import asyncio
import threading
import time

import pytest

from mapper.service.protocol import Reason, TransferRequest, TransferResult
from mapper.service.queue import Queue


def request(**fields):
    side = {"model": "m", "cache_salt": "t"}
    base = {"session": "s", "token_ids": [1], "deadline_ms": 20_000, "source": side, "target": side}
    return TransferRequest(**{**base, **fields})


class Slow:
    """Stands for the transfers: works in steps until it is done, late or told to stop."""

    def __init__(self, steps=400):
        self.steps = steps
        self.running = 0
        self.order = []
        self.began = threading.Event()

    def run(self, request, deadline, stop=None):
        self.running += 1
        assert self.running == 1, "two at once"
        self.began.set()
        reason = Reason.MAPPED
        for _ in range(self.steps if request.background else 1):
            if stop is not None and stop.is_set():
                reason = Reason.YIELDED
                break
            time.sleep(0.01)
        self.running -= 1
        self.order.append("background" if request.background else "foreground")
        return TransferResult(status="applied", reason=reason, pair="m->m")


async def present():
    return False


async def begun(transfers):
    while not transfers.began.is_set():
        await asyncio.sleep(0.01)


async def test_a_background_transfer_yields_to_one_that_is_waited_for():
    transfers = Slow()
    queue = Queue(transfers)
    background = asyncio.create_task(queue.background(request(background=True), present))
    await begun(transfers)
    result = await queue.foreground(request())
    assert result.reason is Reason.MAPPED
    assert (await background).reason is Reason.YIELDED
    assert transfers.order == ["background", "foreground"]


async def test_without_anybody_else_it_comes_to_its_end():
    queue = Queue(Slow(steps=3))
    result = await queue.background(request(background=True), present)
    assert result.reason is Reason.MAPPED


async def test_it_waits_for_all_others():
    transfers = Slow(steps=1)
    queue = Queue(transfers)
    others = [asyncio.create_task(queue.foreground(request())) for _ in range(5)]
    await asyncio.sleep(0)
    await queue.background(request(background=True), present)
    await asyncio.gather(*others)
    assert transfers.order == ["foreground"] * 5 + ["background"]


async def test_a_client_that_leaves_ends_it():
    transfers = Slow()
    queue = Queue(transfers)
    left = False

    async def gone():
        return left

    background = asyncio.create_task(queue.background(request(background=True), gone))
    await begun(transfers)
    left = True
    assert (await background).reason is Reason.YIELDED


async def test_a_background_transfer_that_never_gets_its_turn_is_late():
    transfers = Slow()
    queue = Queue(transfers)
    first = asyncio.create_task(queue.background(request(background=True), present))
    await begun(transfers)
    late = await queue.background(request(background=True, deadline_ms=100), present)
    assert (late.status, late.reason) == ("fallback_reprefill", Reason.DEADLINE)
    await queue.foreground(request())
    await first


async def test_an_error_frees_the_turn():
    class Broken(Slow):
        def run(self, request, deadline, stop=None):
            raise RuntimeError("broken")

    queue = Queue(Broken())
    for _ in range(2):
        assert (await queue.foreground(request())).reason is Reason.ERROR
        background = await queue.background(request(background=True), present)
        assert background.reason is Reason.ERROR


@pytest.mark.parametrize("background", [False, True])
async def test_a_cancelled_request_leaves_its_thread_alone_until_it_is_done(background):
    transfers = Slow(steps=30)
    queue = Queue(transfers)
    wanted = request(background=background)
    call = queue.background(wanted, present) if background else queue.foreground(wanted)
    task = asyncio.create_task(call)
    await begun(transfers)
    task.cancel()
    assert (await queue.foreground(request())).reason is Reason.MAPPED
    assert len(transfers.order) == 2
