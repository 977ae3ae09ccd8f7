"""What a run measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mapper.errors import BadTask

TAILS = (1, 16, 32, 64, 128)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What is measured, as it goes into the report.

    `harness`: tasks of lm-evaluation-harness, `harness_tasks` a folder of YAML files of more.
    `minutes` bounds the run: fewer items are measured where all would take longer; 0 is no
    bound. `tail` is the native tail of task questions and of one measurement of each variant; None: that of the first
    artifact.
    """

    conversations: int = 40
    items: int = 100
    tail: int | None = None
    minutes: float = 12.0
    split: str = "heldout"
    dtype: str = "float32"
    tasks: tuple[str, ...] = ()
    harness: tuple[str, ...] = ()
    harness_tasks: Path | None = None

    def record(self) -> dict[str, Any]:
        """As JSON; a folder's path is nobody else's affair."""
        fields = vars(self) | {"tasks": list(self.tasks), "harness": list(self.harness)}
        return {name: value for name, value in fields.items() if name != "harness_tasks"}

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadTask(f"dtype {self.dtype!r}: use one of {', '.join(DTYPES)}")
        for name, least in (("conversations", 1), ("items", 1), ("tail", 1), ("minutes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadTask(f"{name} must be at least {least}")
        if self.harness_tasks is not None and not self.harness:
            raise BadTask("harness_tasks defines tasks; name in `harness` which of them to run")
