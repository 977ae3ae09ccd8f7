"""Several gateway processes on one listening socket, watched and restarted."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess

from prometheus_client.multiprocess import mark_process_dead

from router import log
from router.metrics import MULTIPROC_DIR
from router.server.serve import serve
from router.settings import Settings

logger = log.get("server")
_POLL_SECONDS = 0.2
# A process that ends sooner than this after its start will do so again.
_HOPELESS_SECONDS = 3.0


def supervise(settings: Settings, listener: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT; the result is the exit status."""
    folder = tempfile.mkdtemp(prefix="baton-metrics-")
    # Read when prometheus_client is imported, which the new processes do after this.
    os.environ[MULTIPROC_DIR] = folder
    stopping: list[int] = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda number, frame: stopping.append(number))
    context = multiprocessing.get_context("spawn")
    children: dict[BaseProcess, float] = {}

    def start() -> None:
        child = context.Process(target=_child, args=(settings, listener))
        child.start()
        children[child] = time.monotonic()

    try:
        for _ in range(settings.processes):
            start()
        status = 0
        while not stopping:
            time.sleep(_POLL_SECONDS)
            for child in [child for child in children if not child.is_alive()]:
                age = time.monotonic() - children.pop(child)
                # Its gauges, which would be added to the others' for ever.
                mark_process_dead(child.pid, folder)
                logger.error("process_ended", exit_status=child.exitcode, seconds=round(age, 1))
                if age < _HOPELESS_SECONDS:
                    stopping.append(signal.SIGTERM)
                    status = 1
                else:
                    start()
        for child in children:
            child.terminate()
        for child in children:
            child.join()
        # A process that was still starting has no handler for the signal yet.
        clean = (0, -signal.SIGTERM)
        return status or int(any(child.exitcode not in clean for child in children))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(settings: Settings, listener: socket.socket) -> None:
    log.configure(settings.log_level)
    threading.Thread(target=_follow_parent, daemon=True).start()
    raise SystemExit(serve(settings, listener))


def _follow_parent() -> None:
    """A parent that was killed could not say goodbye: drain as if it had."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
