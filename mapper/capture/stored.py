"""Calibration data that costs no prefill: pages that two live workers hold of the same tokens.

A page does not say which tokens it is of, nor where it stands. Layer 0 does: its values depend on
the token alone, so that the nearest row of the source's own table names it. The guess is then
proved: page keys are a SHA-256 chain over the token ids from the exact namespace's seed, and a
page that the chain does not reach (a wrong guess, an approximate lineage, an unnamed tenant, a
missing page before it) is left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mapper.capture.model import CapturedModel
from mapper.capture.pairs import StoredPair
from mapper.errors import CalibrationError
from mapper.keys import Namespace
from mapper.spec import ModelSpec
from mapper.store.directory import DirectoryStore
from mapper.store.page import PageLayout, Provenance

# Only bounds what this process would write, and it writes nothing.
_LIMIT = 1 << 40


@dataclass(frozen=True)
class _Side:
    """One model's pages in a store: a layout for each tensor-parallel rank."""

    store: DirectoryStore
    layouts: tuple[PageLayout, ...]

    def keys(self) -> set[str]:
        return set.intersection(*(self.store.keys(layout) for layout in self.layouts))

    def read(self, key: str) -> torch.Tensor | None:
        """[layers, 2, tokens, kv_heads, head_dim] in fp32 of an exact page, else None."""
        parts = [self.store.get(layout, key) for layout in self.layouts]
        if any(part is None or part[1] is not Provenance.COMPUTED for part in parts):
            return None
        return torch.cat([page.float() for page, _ in parts], dim=3)


class StoredPairs:
    """The exact pages that both models have in the store at `root`.

    `tenants` are the cache salts whose pages may be read; None stands for no salt.
    `skipped` counts pages left out, by reason, once iterated.
    """

    def __init__(
        self,
        root: Path,
        source: CapturedModel,
        specs: Sequence[ModelSpec],
        tenants: Sequence[str | None] = (None,),
    ) -> None:
        """
        Raises:
            CalibrationError: no store there, or none with workers of these two models.
        """
        if not Path(root).is_dir():
            raise CalibrationError(f"{root} is no page store")
        store = DirectoryStore(root, _LIMIT)
        sizes = {
            ModelSpec.model_validate(one["spec"]).fingerprint: one["tp_size"]
            for one in store.announced()
        }
        self._sides = [_Side(store, _layouts(spec, sizes, root)) for spec in specs]
        self._table = value_table(source)
        self._seeds = [Namespace(cache_salt=tenant).seed() for tenant in tenants]
        self._page_size = specs[0].page_size
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[StoredPair]:
        for key, ids, page in self._placed():
            source, target = (side.read(key) for side in self._sides)
            if source is None or target is None:
                self.skipped["page gone or approximate"] += 1
                continue
            if not (source.isfinite().all() and target.isfinite().all()):
                self.skipped["values that are not finite"] += 1
                continue
            positions = torch.arange(page * self._page_size, (page + 1) * self._page_size)
            yield StoredPair(_kv(source), _kv(target), positions, ids)

    def _placed(self) -> list[tuple[str, torch.Tensor, int]]:
        """(key, token ids, index of the page) of every page that a chain from a seed reaches."""
        left: dict[str, torch.Tensor] = {}
        for key in sorted(set.intersection(*(side.keys() for side in self._sides))):
            page = self._sides[0].read(key)
            if page is not None:
                left[key] = recognise(self._table, page[0, 1])
        placed, frontier, depth = [], list(self._seeds), 0
        encoded = {key: ids.numpy().astype("<u4").tobytes() for key, ids in left.items()}
        while frontier:
            found = [
                key
                for last in frontier
                for key in left
                if hashlib.sha256(last + encoded[key]).hexdigest() == key
            ]
            placed += [(key, left.pop(key), depth) for key in found]
            frontier, depth = [bytes.fromhex(key) for key in found], depth + 1
        self.skipped["not proved exact"] += len(left)
        return placed


@torch.inference_mode()
def value_table(model: CapturedModel) -> torch.Tensor:
    """Layer 0's values of every token, [vocabulary, kv_heads * head_dim]."""
    body = model.model.base_model
    layer = body.layers[0]
    rows = body.embed_tokens.weight.split(8192)
    return torch.cat([layer.self_attn.v_proj(layer.input_layernorm(part)) for part in rows])


def recognise(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The token ids [tokens] whose rows are nearest to values [tokens, kv_heads, head_dim]."""
    distance = table.square().sum(1) - 2 * values.flatten(1) @ table.T
    return distance.argmin(1)


def _layouts(spec: ModelSpec, sizes: dict[str, int], root: Path) -> tuple[PageLayout, ...]:
    if spec.fingerprint not in sizes:
        raise CalibrationError(
            f"no worker of {spec.name} (fingerprint {spec.fingerprint}, {spec.kv_dtype}, page size "
            f"{spec.page_size}) has announced itself in {root}; there are {sorted(sizes)}"
        )
    count = sizes[spec.fingerprint]
    return tuple(PageLayout.of(spec, rank, count) for rank in range(count))


def _kv(page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return page[:, 0], page[:, 1]
