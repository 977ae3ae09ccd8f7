"""Structured logs on stderr, one JSON object a line. Prompts, answers and keys never enter."""

from __future__ import annotations

import logging
import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, force=True)


def get(name: str) -> structlog.stdlib.BoundLogger:
    return structlog.get_logger(component=name)
