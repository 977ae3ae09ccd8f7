"""Structured logs on stderr, one JSON object a line. Prompts, answers and keys never enter."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

import structlog


class _Unfailing:
    """A full disk or a closed pipe under the log costs log lines, never requests."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(level: str = "info") -> None:
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Tracebacks without local variables, which would hold prompts and keys.
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(_Unfailing(sys.stderr)),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, force=True)


def get(name: str) -> structlog.stdlib.BoundLogger:
    return structlog.get_logger(component=name)
