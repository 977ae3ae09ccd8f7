"""Writes values into a policy's YAML and leaves its comments and layout as they are."""

from __future__ import annotations

import json
from typing import Any

import yaml


def has(text: str, key: str) -> bool:
    return _scalar(text, key) is not None


def put(text: str, key: str, value: Any) -> str:
    """`text` with the value of a dotted key replaced. Raises ValueError when it is not there."""
    node = _scalar(text, key)
    if node is None:
        raise ValueError(f"the policy has no `{key}` with a plain value to write over")
    start, end = node.start_mark.index, node.end_mark.index
    return text[:start] + json.dumps(value) + text[end:]


def _scalar(text: str, key: str) -> yaml.ScalarNode | None:
    node = yaml.compose(text, yaml.SafeLoader)
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == part), None)
    return node if isinstance(node, yaml.ScalarNode) else None
