"""Choosing among fitted maps by what they do to held-out attention outputs.

After W_O, the error of a layer's attention output ranks variants as downstream accuracy
does; the R2 of keys and values does not (arXiv 2609.00891).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapper.capture.model import CapturedModel
from mapper.capture.pairs import Pair
from mapper.methods.base import LayerMap, by_head, on_norm_sphere, select


@dataclass(frozen=True)
class Score:
    """Relative squared error of a layer's attention output after W_O, and its cosine."""

    error: float
    cosine: float


class HeldOut:
    """Held-out pairs, kept in memory: their number is bounded, whatever the text's size."""

    def __init__(self, pairs: Sequence[Pair], target: CapturedModel) -> None:
        self.pairs = list(pairs)
        self.target = target
        self._features = [
            {kind: by_head(side) for kind, side in pair.source.items()} for pair in self.pairs
        ]

    def score(
        self, layer: int, k_map: LayerMap | None = None, v_map: LayerMap | None = None
    ) -> Score:
        """Replaces the layer's keys, values or both by mapped ones, except at position 0."""
        projection = self.target.output_projection(layer).T
        error = norm = cosine = count = 0.0
        for pair, features in zip(self.pairs, self._features, strict=True):
            k, v = pair.native.k[layer], pair.native.v[layer]
            mapped_k, mapped_v = k, v
            if k_map is not None:
                mapped_k = k_map(select(features["k"], k_map.layers)).transpose(0, 1)
                gain = self.target.key_norm(layer)
                if gain is not None:
                    mapped_k = on_norm_sphere(mapped_k[None], gain[None])[0]
                mapped_k = keep_sink(self.target.rotary.apply(mapped_k, pair.positions), k, pair)
            if v_map is not None:
                mapped_v = v_map(select(features["v"], v_map.layers)).transpose(0, 1)
                mapped_v = keep_sink(mapped_v, v, pair)
            native = attend(pair, layer, k, v) @ projection
            mapped = attend(pair, layer, mapped_k, mapped_v) @ projection
            error += float((mapped - native).square().sum())
            norm += float(native.square().sum())
            cosine += float(torch.cosine_similarity(mapped, native, dim=-1).sum())
            count += len(native)
        return Score(error / norm, cosine / count)


def keep_sink(mapped: torch.Tensor, native: torch.Tensor, pair: Pair) -> torch.Tensor:
    return torch.where((pair.positions == 0)[:, None, None], native, mapped)


def attend(pair: Pair, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention outputs [sampled, attention_heads * head_dim] of the pair's sampled queries."""
    queries, at = pair.native.queries[layer], pair.native.query_positions
    sampled, _, width = queries.shape
    grouped = queries.view(sampled, k.shape[1], -1, width)
    logits = torch.einsum("uhgd,nhd->hgun", grouped, k)
    logits.masked_fill_(pair.positions > at[:, None], float("-inf"))
    return torch.einsum("hgun,nhd->uhgd", logits.softmax(-1), v).reshape(sampled, -1)
