"""Servers in threads of a test: an ASGI application, or the same bytes for everybody."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn


class Threaded:
    """An ASGI application on its own loop in a thread, on a loopback port."""

    def __init__(self, app: Any, port: int = 0, server: uvicorn.Server | None = None) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.server = server or uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none")
        )
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Threaded:
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.listener.close()


class RawServer:
    """Answers every request but health checks with the same bytes and closes the connection.

    `connections` are those that a turn has made: how often it was tried.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if b"/health" in request:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.connections += request.startswith(b"POST")
                connection.sendall(self.answer)

    def stop(self) -> None:
        self.listener.close()
