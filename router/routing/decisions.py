"""The log of decisions: one JSON object each, with inputs and reason, and no prompt text."""

from __future__ import annotations

import logging
import logging.handlers
import os
from pathlib import Path
from typing import Any, TextIO

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


class _File(logging.handlers.WatchedFileHandler):
    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._metrics = metrics
        super().__init__(path, delay=True, encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        text = orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS).decode()
        self.handle(logging.LogRecord("decisions", logging.INFO, "", 0, text, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self._metrics.decisions_unwritten.inc()

    def _open(self) -> TextIO:
        # Private: with log_text it holds what users wrote.
        return open(
            self.baseFilename, "a", encoding="utf-8",
            opener=lambda name, flags: os.open(name, flags, 0o600),
        )  # fmt: skip
