"""Files that a policy refers to: read when it is loaded, relative to its own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo

from policies.logistic import Calibrated


def locate(name: str, info: ValidationInfo) -> Path:
    """The path of a file named in a policy; it is added to the files to watch."""
    context = info.context or {}
    path = Path(context.get("folder", "."), name)
    context.get("files", set()).add(path)
    return path


def _read_model(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    path = locate(value, info)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


Model = Annotated[Calibrated, BeforeValidator(_read_model, json_schema_input_type=str | Calibrated)]
