"""The log of decisions: one JSON object each, with inputs and reason, and no prompt text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from router import log
from router.metrics import Metrics
from router.settings import Decisions

logger = log.get("decisions")


class DecisionLog:
    """On stderr like every other log line; and, where asked for, in a file with all inputs.

    The file is appended to, one write a line, and opened again when it was moved away. What
    cannot be written is counted and never keeps a turn from being answered.
    """

    def __init__(self, settings: Decisions, metrics: Metrics) -> None:
        self._text = settings.log_text
        self._file = _File(settings.log_file, metrics) if settings.log_file else None

    def write(self, entry: dict[str, Any], inputs: dict[str, Any], text: dict[str, Any]) -> None:
        """`entry` is the decision; `inputs` all that went into it; `text` the users' words."""
        logger.info("decision", **entry)
        if self._file is not None:
            line = {"event": "decision", **entry, "inputs": inputs}
            self._file.write({**line, **text} if self._text else line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _File:
    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._fd: int | None = None

    def write(self, line: dict[str, Any]) -> None:
        data = orjson.dumps(line) + b"\n"
        try:
            if self._moved():
                self.close()
            if self._fd is None:
                # Private: with log_text it holds what users wrote.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            # In one piece, so that several gateways can share the file.
            written = os.write(self._fd, data)
        except OSError:
            written = 0
        if written < len(data):
            self._metrics.decisions_unwritten.inc()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _moved(self) -> bool:
        if self._fd is None:
            return False
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)
