"""Who maps when: one transfer at a time, and those that nobody waits for after all others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from mapper.service.protocol import Reason, TransferRequest, TransferResult
from mapper.service.transfer import Transfers

log = structlog.get_logger()

_LOOK_SECONDS = 0.1
_NICE = 10


class Queue:
    """Runs transfers in threads, one at a time.

    Mapping uses every core it may use: two at once would each miss their deadline. A
    background transfer starts when nobody else waits, and stops between two chunks of pages
    as soon as somebody does.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._turn = asyncio.Semaphore(1)
        self._waiting = 0
        self._yield: threading.Event | None = None
        self._foreground = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        # Linux gives each thread a priority of its own, and those it starts have the same.
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="background", initializer=_lower_priority
        )

    async def foreground(self, request: TransferRequest) -> TransferResult:
        began = time.monotonic()
        deadline = began + request.deadline_ms / 1000
        self._waiting += 1
        if self._yield is not None:
            self._yield.set()
        try:
            await asyncio.wait_for(self._turn.acquire(), deadline - began)
        except TimeoutError:
            return _not_done(request, Reason.DEADLINE, began)
        finally:
            self._waiting -= 1
        return await self._run(self._foreground, request, deadline, None)

    async def background(
        self, request: TransferRequest, gone: Callable[[], Awaitable[bool]]
    ) -> TransferResult:
        """`gone` tells whether the client has closed its connection."""
        began = time.monotonic()
        deadline = began + request.deadline_ms / 1000
        stop = threading.Event()
        watch = asyncio.ensure_future(_when(gone, stop))
        try:
            while not await self._acquire_when_idle():
                if stop.is_set() or time.monotonic() > deadline:
                    reason = Reason.YIELDED if stop.is_set() else Reason.DEADLINE
                    return _not_done(request, reason, began)
                await asyncio.sleep(_LOOK_SECONDS)
            self._yield = stop
            return await self._run(self._background, request, deadline, stop)
        finally:
            watch.cancel()

    async def _acquire_when_idle(self) -> bool:
        if self._turn.locked() or self._waiting:
            return False
        await self._turn.acquire()
        return True

    async def _run(
        self,
        threads: ThreadPoolExecutor,
        request: TransferRequest,
        deadline: float,
        stop: threading.Event | None,
    ) -> TransferResult:
        # Released when the thread is done, not when a client gives up waiting: cancelling the
        # request does not stop the thread, and the next transfer must not run beside it.
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        work = loop.run_in_executor(threads, self._transfers.run, request, deadline, stop)
        work.add_done_callback(lambda _: self._release())
        try:
            return await asyncio.shield(work)
        except Exception:
            log.exception("transfer_failed", pair=_pair(request))
            return _not_done(request, Reason.ERROR, began)

    def _release(self) -> None:
        self._yield = None
        self._turn.release()


async def _when(gone: Callable[[], Awaitable[bool]], stop: threading.Event) -> None:
    while not await gone():
        await asyncio.sleep(_LOOK_SECONDS)
    stop.set()


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _pair(request: TransferRequest) -> str:
    return f"{request.source.model}->{request.target.model}"


def _not_done(request: TransferRequest, reason: Reason, began: float) -> TransferResult:
    waited = (time.monotonic() - began) * 1000
    return TransferResult(
        status="fallback_reprefill", reason=reason, pair=_pair(request), ms=waited
    )
