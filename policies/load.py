"""Policies from YAML, chosen by `kind`; what is wrong is said with file, line, key and choices."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Union, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo

from policies.adaptive import Adaptive
from policies.base import Policy
from policies.files import locate
from policies.pinned import Pinned
from policies.rollout import Rollout
from policies.turns import Turns

KINDS: dict[str, type[Policy]] = {
    "adaptive": Adaptive,
    "pinned": Pinned,
    "rollout": Rollout,
    "turns": Turns,
}


class PolicyError(ValueError):
    """A policy that cannot be loaded; the message names the place, the key and what is allowed."""


def from_dict(data: Any, where: str = "policy", folder: Path | str = ".") -> Policy:
    """Files that `data` names are looked for in `folder`. Raises PolicyError."""
    return _build(data, where, None, {"folder": folder, "files": set()})


def from_file(path: str | Path) -> Policy:
    """Raises PolicyError."""
    return _read(Path(path), {"folder": Path(path).parent, "files": set()})


def watched_files(path: str | Path) -> set[Path]:
    """The file and those it refers to: a change in any of them changes the policy.

    Of a policy that does not load, as many as were found before the error.
    """
    files = {Path(path)}
    with suppress(PolicyError):
        _read(Path(path), {"folder": Path(path).parent, "files": files})
    return files


def json_schema() -> dict[str, Any]:
    """Of all kinds, for editors."""
    union = Annotated[Union[tuple(KINDS.values())], Field(discriminator="kind")]  # noqa: UP007
    return TypeAdapter(union).json_schema()


def read_part(value: Any, info: ValidationInfo) -> Policy:
    """A policy inside a rollout: the policy itself, or a file's name."""
    if isinstance(value, Policy):
        return value
    context = {**(info.context or {}), "part": True}
    if isinstance(value, dict):
        return _build(value, "", None, context)
    path = locate(str(value), info)
    return _read(path, {**context, "folder": path.parent})


def _read(path: Path, context: dict[str, Any]) -> Policy:
    try:
        text = path.read_text(encoding="utf-8")
        data, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(f"{path}: {error}") from None
    return _build(data, str(path), tree, context)


def _build(data: Any, where: str, tree: yaml.Node | None, context: dict[str, Any]) -> Policy:
    if not isinstance(data, dict):
        raise PolicyError(
            f"{_at(where)}expected a mapping with a `kind`, got {type(data).__name__}"
        )
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        place = _at(where, tree, ("kind",))
        raise PolicyError(f"{place}kind: {kind!r} is not one of {', '.join(sorted(KINDS))}")
    if kind == "rollout" and context.get("part"):
        raise PolicyError(f"{_at(where)}kind: a rollout cannot be part of a rollout")
    try:
        return KINDS[kind].model_validate(data, context=context)
    except ValidationError as error:
        lines = [_explain(item, KINDS[kind], where, tree) for item in error.errors()]
        raise PolicyError("\n".join(lines)) from None


def _explain(item: Any, policy: type[Policy], where: str, tree: yaml.Node | None) -> str:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    key = ".".join(str(part) for part in loc) or "(policy)"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = f"unknown key; allowed: {', '.join(_allowed(policy, loc[:-1]))}"
    return f"{_at(where, tree, loc)}{key}: {message}"


def _at(where: str, tree: yaml.Node | None = None, loc: tuple[Any, ...] = ()) -> str:
    """ "file:line: " of the deepest part of `loc` that it has."""
    if not where:
        return ""
    if tree is None:
        return f"{where}: "
    node, line = tree, tree.start_mark.line
    for part in loc:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = (node.value[part], node.value[part]) if part < len(node.value) else None
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return f"{where}:{line + 1}: "


def _allowed(policy: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys that the section at `loc` may have."""
    model: type[BaseModel] = policy
    for part in loc:
        if not isinstance(part, str):
            continue
        field = next(
            (f for n, f in model.model_fields.items() if part in (n, f.alias)),
            None,
        )
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            break
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if (found := _model_in(part)) is not None:
            return found
    return None
