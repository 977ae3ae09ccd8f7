"""Tokens by words and pages of their KV, as the fake worker and the fake mapper count them."""

from __future__ import annotations

import hashlib
from typing import Any

PAGE = 4


def tokenize(messages: list[dict[str, Any]], opened: bool = True) -> list[int]:
    words: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = " ".join((part.get("text") or "") for part in content)
        words += [f"<{message['role']}>", *(content or "").split()]
        for call in message.get("tool_calls") or []:
            words += [call["function"]["name"], call["function"]["arguments"]]
    if opened:
        words.append("<assistant>")
    return [int.from_bytes(hashlib.md5(w.encode()).digest()[:3], "big") for w in words]


def pages(token_ids: list[int]) -> list[bytes]:
    keys, key = [], b""
    for start in range(0, len(token_ids) - len(token_ids) % PAGE, PAGE):
        key = hashlib.sha256(key + repr(token_ids[start : start + PAGE]).encode()).digest()
        keys.append(key)
    return keys


class PageStore:
    """Pages by namespace, shared by the fake workers and the fake mapper."""

    def __init__(self) -> None:
        self.namespaces: dict[tuple[str, str | None, str | None], set[bytes]] = {}

    def add(self, namespace: tuple, keys: list[bytes]) -> None:
        self.namespaces.setdefault(namespace, set()).update(keys)

    def prefix(self, namespace: tuple, keys: list[bytes]) -> int:
        known = self.namespaces.get(namespace, set())
        count = 0
        for key in keys:
            if key not in known:
                break
            count += 1
        return count
