"""SGLang's page keys, computed without SGLang: a SHA-256 chain over pages of token ids.

The chain is seeded by the request's namespace `(extra_key, cache_salt)`, so pages of
different tenants, or of exact and mapped lineages, never share a key. A test holds this
module to SGLang's own function, byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Namespace:
    """What separates caches of the same tokens: lineage (`extra_key`) and tenant (`cache_salt`).

    Raises:
        ValueError: an empty salt. SGLang reads it as no salt at all, so a tenant with an
            empty name would share its pages with everybody who has none.
    """

    extra_key: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.cache_salt == "":
            raise ValueError("cache_salt must not be empty")

    def seed(self) -> bytes:
        if self.extra_key is None and self.cache_salt is None:
            return b""
        digest = hashlib.sha256(b"sglang-cache-namespace-v1")
        for part in (self.extra_key, self.cache_salt):
            if part is None:
                digest.update(b"\x00")
            else:
                encoded = part.encode()
                digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()


def page_keys(token_ids: Sequence[int], page_size: int, namespace: Namespace) -> list[str]:
    """Keys of all whole pages of `token_ids`; the partial last page has none.

    Raises:
        ValueError: a token id that does not fit 32 bits, or a page size below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() > 0xFFFFFFFF):
        raise ValueError("token ids must fit 32 unsigned bits")
    pages = ids.astype("<u4")[: len(ids) // page_size * page_size].reshape(-1, page_size)
    keys, last = [], namespace.seed()
    for page in pages:
        last = hashlib.sha256(last + page.tobytes()).digest()
        keys.append(last.hex())
    return keys
