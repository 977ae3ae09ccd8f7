"""Markdown tables, and figures with their intervals, for all reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Its lines. None is an empty cell."""
    shown = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return [_line(columns), _line(["---"] * len(columns)), *map(_line, shown)]


def interval(one: dict[str, float], form: str = "+.4f") -> str:
    """Of {"difference", "low", "high"}."""
    return f"{one['difference']:{form}} ({one['low']:{form}} to {one['high']:{form}})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
