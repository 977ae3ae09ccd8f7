"""Runs the gateway in one process or several, and drains it on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from types import FrameType

import uvicorn

from router import log
from router.app import create_app
from router.auth import keys
from router.server.protocol import protocol
from router.settings import ConfigError, Settings

logger = log.get("server")
# After the drain, for what ends by an error: to be written, and its tasks to finish.
_LAST_SECONDS = 5


class Server(uvicorn.Server):
    """Withdraws readiness, waits, closes the listener, lets open requests finish, exits with 0."""

    def __init__(self, settings: Settings) -> None:
        self._app = create_app(settings)
        self._timeouts = settings.timeouts
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                self._app,
                host=settings.host,
                port=settings.port,
                http=protocol(settings.timeouts.headers_seconds),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=2 * settings.limits.header_bytes,
                timeout_graceful_shutdown=int(settings.timeouts.drain_seconds) + _LAST_SECONDS,
            )
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, once started; tells which port 0 has become."""
        return self.servers[0].sockets[0].getsockname()[:2]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host, port = self.address
            logger.info("listening", host=host, port=port)

    def drain(self) -> None:
        gateway = self._app.state.gateway
        if gateway.draining:
            return
        gateway.draining = True
        logger.info("draining")
        delay = self._timeouts.drain_delay_seconds
        self._loop.call_later(delay, self._close_listener)
        self._loop.call_later(delay + self._timeouts.drain_seconds, gateway.abort_running)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would note the signal and raise it again after the shutdown, which
        # makes the exit status of a clean shutdown that of a killed process.
        if self._loop is None:
            self.should_exit = True
            return
        if sig == signal.SIGINT and self._app.state.gateway.draining:
            self.force_exit = self.should_exit = True
        self._loop.call_soon_threadsafe(self.drain)

    def _close_listener(self) -> None:
        self.should_exit = True


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT; the result is the exit status."""
    log.configure(settings.log_level)
    if settings.auth.keys_file is not None:
        try:
            keys.read(settings.auth.keys_file)
        except ConfigError as error:
            logger.error("bad_configuration", error=str(error))
            return 2
    if settings.processes > 1:
        from router.server.processes import supervise

        try:
            listener = bind(settings)
        except OSError as error:
            logger.error(
                "cannot_listen", host=settings.host, port=settings.port, error=error.strerror
            )
            return 1
        return supervise(settings, listener)
    return serve(settings)


def serve(settings: Settings, listener: socket.socket | None = None) -> int:
    server = Server(settings)
    server.run(sockets=[listener] if listener is not None else None)
    return 0 if server.started else 1


def bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    os.set_inheritable(listener.fileno(), True)
    return listener
