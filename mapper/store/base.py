"""What the linker and the mapper need of a page store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mapper.store.page import PageLayout, Provenance


class PageStore(Protocol):
    """Pages by key; a missing, bad or evicted page is a miss and never an error.

    Keys are SGLang's page keys: 64 hex digits naming the tokens up to and including the
    page, and the namespace they were computed in (see `mapper.keys`).
    """

    def prefix(self, layout: PageLayout, keys: Sequence[str]) -> int:
        """How many of `keys`, counted from the first, are present."""
        ...

    def get(self, layout: PageLayout, key: str) -> tuple[torch.Tensor, Provenance] | None:
        """The page (a read-only view of shape `layout.shape`), checked, or None."""
        ...

    def put(self, layout: PageLayout, key: str, page: torch.Tensor, provenance: Provenance) -> bool:
        """Stores a page unless its key is present; False when no room could be made."""
        ...

    def link(self, layout: PageLayout, existing: str, key: str) -> bool:
        """Makes the page at `existing` reachable as `key` too, without copying it."""
        ...

    def remove(self, layout: PageLayout, key: str) -> None:
        """Forgets a page; one that is absent already is no error."""
        ...

    def touch(self, layout: PageLayout, keys: Sequence[str], pin_seconds: float = 0.0) -> None:
        """Marks pages, in chain order, as just used, and unevictable for `pin_seconds`."""
        ...
