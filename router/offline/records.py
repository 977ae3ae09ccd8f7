"""What `baton tune` reads: turns with the outcome of both models, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies import Turn


class RecordError(ValueError):
    """A file that cannot be used; the message names file, line and key."""


class Outcome(BaseModel):
    """Of one model on one turn. `quality` is 0 to 1: right or wrong, or a grade."""

    model_config = ConfigDict(extra="ignore")

    quality: float = Field(ge=0, le=1)


class Item(BaseModel):
    """One turn. Unknown fields are ignored, so that a decision log with outcomes added will do.

    Items of one `session` (default: the id) are kept together in splits and resampling.
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    session: str | None = None
    task: str = "all"
    text: str = ""
    # The user's messages before it, newest first.
    earlier: tuple[str, ...] = ()
    turn: int = Field(default=1, ge=1)
    messages: int = Field(default=1, ge=0)
    prompt_chars: int | None = None
    has_tools: bool = False
    has_schema: bool = False
    prompt_logprob: float | None = None
    # Of the small model's answer, as policies.Signals has them.
    signals: dict[str, float | None] = Field(default_factory=dict)
    small: Outcome
    large: Outcome

    @property
    def group(self) -> str:
        return self.session or self.id

    @property
    def length(self) -> int:
        return len(self.text) if self.prompt_chars is None else self.prompt_chars

    @property
    def gap(self) -> float:
        """What the large model would have added to quality; negative where it is the worse one."""
        return self.large.quality - self.small.quality

    def as_turn(self) -> Turn:
        return Turn(
            number=self.turn,
            messages=self.messages,
            prompt_chars=self.length,
            has_tools=self.has_tools,
            has_schema=self.has_schema,
            text=self.text,
            earlier=self.earlier,
            prompt_logprob=self.prompt_logprob,
        )


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file. Raises RecordError."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise RecordError(f"{path}:{number}: expected an object, got {type(row).__name__}")
        lines.append((number, row))
    return lines


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A decision log's line with what its `inputs` say of the turn; its gain is a score."""
    turn = dict((row.get("inputs") or {}).get("turn") or {})
    turn.pop("number", None)
    known = {key: value for key, value in row.items() if value is not None}
    if "gain" in (row.get("scores") or {}):
        known.setdefault("gain", row["scores"]["gain"])
    return turn | known


def read_items(path: Path) -> tuple[list[Item], int]:
    """The turns that both models' outcomes are known of, and how many lines have not both.

    Raises RecordError for a line that has them and is not right otherwise.
    """
    items, skipped = [], 0
    for number, row in read_lines(path):
        if "small" not in row or "large" not in row:
            skipped += 1
            continue
        row.setdefault("id", f"line-{number}")
        try:
            items.append(Item.model_validate(flat(row)))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            raise RecordError(f"{path}:{number}: {faults}") from None
    if not items:
        raise RecordError(
            f"{path}: no line has both models' outcomes; each needs "
            '"small": {"quality": 0..1} and "large": {"quality": 0..1}'
        )
    return items, skipped
