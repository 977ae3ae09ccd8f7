"""What `baton replay` reads: sessions of turns, from a decision log or a JSONL of turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies import Turn
from policies.base import Task, Tier
from router.offline.records import RecordError, flat, read_lines


class ReplayTurn(BaseModel):
    """One turn as it was. Unknown fields are ignored, so that a decision log will do.

    `prompt_tokens` is the whole prompt, earlier turns included. `quality` by tier makes a
    replay judge answers; without it only costs are compared. Without `text` the task class
    and the gain are taken from the log, as the policy of that time found them.
    """

    model_config = ConfigDict(extra="ignore")

    session: str
    turn: int = Field(ge=1)
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    tenant: str = ""
    text: str = ""
    earlier: tuple[str, ...] = ()
    task: Task | None = None
    gain: float | None = None
    has_tools: bool = False
    has_schema: bool = False
    tool_loop: bool = False
    forced: Tier | None = None
    idle_seconds: float = 0.0
    # Unix seconds; where given, idle times come from it.
    time: float | None = None
    prompt_logprob: float | None = None
    # Of the small model's answer, where it is known.
    signals: dict[str, float | None] = Field(default_factory=dict)
    quality: dict[str, float] = Field(default_factory=dict)

    def as_turn(self) -> Turn:
        return Turn(
            number=self.turn,
            messages=2 * self.turn - 1,
            prompt_chars=max(4 * self.prompt_tokens, len(self.text)),
            prompt_tokens=self.prompt_tokens,
            has_tools=self.has_tools,
            has_schema=self.has_schema,
            tool_loop=self.tool_loop,
            forced=self.forced,
            tenant=self.tenant,
            text=self.text,
            earlier=self.earlier,
            prompt_logprob=self.prompt_logprob,
            task=None if self.text else self.task,
            gain=None if self.text else self.gain,
        )


def read_sessions(path: Path) -> tuple[dict[str, list[ReplayTurn]], int]:
    """Sessions with their turns in order, and how many lines are no answered turns.

    Raises RecordError.
    """
    sessions: dict[str, list[ReplayTurn]] = {}
    skipped = 0
    for number, row in read_lines(path):
        if not _answered(row):
            skipped += 1
            continue
        try:
            turn = ReplayTurn.model_validate(flat(row))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            raise RecordError(f"{path}:{number}: {faults}") from None
        sessions.setdefault(turn.session, []).append(turn)
    if not sessions:
        raise RecordError(f"{path}: no answered turns (session, turn, prompt_tokens, ...)")
    return {name: _in_order(turns) for name, turns in sessions.items()}, skipped


def _answered(row: dict[str, Any]) -> bool:
    """A decision log has other lines as well, and turns that were refused or failed."""
    if row.get("event", "decision") != "decision":
        return False
    return row.get("prompt_tokens") is not None and row.get("completion_tokens") is not None


def _in_order(turns: list[ReplayTurn]) -> list[ReplayTurn]:
    turns = sorted(turns, key=lambda turn: turn.turn)
    ordered, before = [], None
    for turn in turns:
        if turn.time is not None and before is not None:
            turn = turn.model_copy(update={"idle_seconds": max(0.0, turn.time - before)})
        before = turn.time
        ordered.append(turn)
    return ordered
