"""Cuts a byte stream into whole server-sent events without changing a byte."""

from __future__ import annotations

import re

# A blank line ends an event; lines end in LF, CRLF or CR, also mixed.
_EOL = rb"(?:\r\n|\n|\r(?!\n))"
_END = re.compile(_EOL + _EOL)


class EventTooLarge(ValueError):
    pass


class Splitter:
    """Feeds on chunks of any size and gives whole events, each with the blank line that ends it.

    The concatenation of all events and `rest` is exactly what was fed.
    """

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._limit = limit

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)

    def feed(self, chunk: bytes) -> list[bytes]:
        self._buffer += chunk
        events: list[bytes] = []
        start = 0
        position = self._scanned
        while match := _END.search(self._buffer, position):
            # A CR at the very end may be the first half of a CRLF: wait for what follows.
            if match.end() == len(self._buffer) and self._buffer[-1] == 0x0D:
                break
            events.append(bytes(self._buffer[start : match.end()]))
            start = position = match.end()
        del self._buffer[:start]
        # The longest terminator has four bytes, so three of them may already be here.
        self._scanned = max(0, len(self._buffer) - 3)
        if len(self._buffer) > self._limit:
            raise EventTooLarge(f"an event of more than {self._limit} bytes")
        return events


def data(event: bytes) -> bytes | None:
    """The event's data, lines joined as the standard says; None for comments and the like."""
    lines = []
    for line in event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
        elif line == b"data":
            lines.append(b"")
    return b"\n".join(lines) if lines else None
