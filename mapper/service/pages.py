"""One live model's pages over all its tensor-parallel ranks, as whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mapper.spec import ModelSpec
from mapper.store import PageLayout, PageStore, Provenance


class ModelPages:
    """Reads and writes pages of one model, heads of all ranks together.

    Tensors are K and V apart, [layers, tokens, kv_heads, head_dim], tokens in chain order.
    """

    def __init__(self, store: PageStore, spec: ModelSpec, tp_size: int) -> None:
        self.spec = spec
        self._store = store
        self._ranks = [PageLayout.of(spec, rank, tp_size) for rank in range(tp_size)]

    def has(self, key: str) -> bool:
        return all(self._store.prefix(rank, [key]) for rank in self._ranks)

    def read(
        self, keys: Sequence[str], *, mapped: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the longest readable prefix of `keys` that was computed, not mapped (unless `mapped`).

        What comes back may be shorter than `keys`: a page can be evicted or found bad at
        any time, and a mapped page is never mapped a second time.
        """
        pages = []
        for key in keys:
            shards = []
            for rank in self._ranks:
                found = self._store.get(rank, key)
                if found is None or (found[1] is Provenance.MAPPED and not mapped):
                    break
                shards.append(found[0])
            if len(shards) < len(self._ranks):
                break
            pages.append(shards[0] if len(shards) == 1 else torch.cat(shards, dim=3))
        if not pages:
            empty = torch.empty(
                self.spec.layers, 0, self.spec.kv_heads, self.spec.head_dim,
                dtype=self._ranks[0].torch_dtype,
            )  # fmt: skip
            return empty, empty.clone()
        # [layers, K|V, tokens, heads, head_dim]
        together = torch.cat(pages, dim=2)
        return together[:, 0], together[:, 1]

    def write(self, key: str, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Stores one mapped page, [layers, page_size, kv_heads, head_dim] each."""
        for rank in self._ranks:
            heads = slice(rank.rank * rank.heads, (rank.rank + 1) * rank.heads)
            page = torch.stack((k[:, :, heads], v[:, :, heads]), dim=1).to(rank.torch_dtype)
            if not self._store.put(rank, key, page, Provenance.MAPPED):
                return False
        return True

    def link(self, existing: str, key: str) -> bool:
        return all(self._store.link(rank, existing, key) for rank in self._ranks)

    def pin(self, keys: Sequence[str], seconds: float) -> None:
        for rank in self._ranks:
            self._store.touch(rank, keys, seconds)
