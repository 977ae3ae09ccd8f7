"""uvicorn's HTTP protocol with a limit on how long request headers may take."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from router import errors


class Protocol(H11Protocol):
    """A connection that sends nothing, or its headers a byte at a time, is closed."""

    headers_seconds = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._between_requests() and self._late is None:
            self._arm()
        super().data_received(data)
        if not self._between_requests():
            self._disarm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # From here on it is the keep-alive time that counts.
        self._disarm()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", msg)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        self._late = self.loop.call_later(self.headers_seconds, self._too_late)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self._refuse(408, "Request Timeout", "The request's headers did not arrive in time.")

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = errors.body(message, errors.type_for(status))
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def protocol(headers_seconds: float) -> type[Protocol]:
    """uvicorn makes protocols itself, so the setting has to be part of the class."""
    return type("Protocol", (Protocol,), {"headers_seconds": headers_seconds})
