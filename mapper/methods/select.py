"""Choosing among fitted maps by what they do to held-out attention outputs.

After W_O, the error of a layer's attention output ranks variants as downstream accuracy
does; the R2 of keys and values does not (arXiv 2609.00891). To compare layers with each other,
the error is weighted by the squared gradient of sampled next tokens' log-likelihood there: the
diagonal of the Fisher information, of which KL is half the quadratic form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mapper.capture.model import CapturedModel
from mapper.capture.pairs import Pair, asked, capture
from mapper.capture.texts import Document
from mapper.methods.base import LayerMap, on_norm_sphere


@dataclass(frozen=True)
class Score:
    """Of a layer's attention output after W_O: relative squared error, cosine, and the error as
    the target's next-token distribution feels it (about nats a token; cross terms left out)."""

    error: float
    cosine: float
    felt: float


class HeldOut:
    """Held-out pairs, kept in memory: their number is bounded, whatever the text's size."""

    def __init__(
        self,
        source: CapturedModel,
        target: CapturedModel,
        documents: Sequence[Document],
        queries: int,
        *,
        wide: bool,
    ) -> None:
        """Samples some `queries` of the target's queries in each document. `wide`: for maps of `wide_inputs`."""
        self.target = target
        self.pairs: list[Pair] = []
        self._features: list[dict[str, torch.Tensor]] = []
        for pair in capture(source, target, documents, asked(queries)):
            self._features.append(pair.features(wide=wide))
            # What is compared is the native cache; a copy of each un-rotated one would be half as much again.
            self.pairs.append(replace(pair, source={}, target={}))
        self._slopes = [
            target.sensitivity(document.ids, pair.native.query_positions)
            for document, pair in zip(documents, self.pairs, strict=True)
        ]

    def score(
        self, layer: int, k_map: LayerMap | None = None, v_map: LayerMap | None = None
    ) -> Score:
        """Replaces the layer's keys, values or both by mapped ones, except at position 0."""
        projection = self.target.output_projection(layer).T
        error = norm = cosine = felt = count = 0.0
        for pair, features, slopes in zip(self.pairs, self._features, self._slopes, strict=True):
            k, v = pair.native.k[layer], pair.native.v[layer]
            mapped_k, mapped_v = k, v
            if k_map is not None:
                mapped_k = k_map(features, "k").transpose(0, 1)
                gain = self.target.key_norm(layer)
                if gain is not None:
                    mapped_k = on_norm_sphere(mapped_k[None], gain[None])[0]
                mapped_k = keep_sink(self.target.rotary.apply(mapped_k, pair.positions), k, pair)
            if v_map is not None:
                mapped_v = v_map(features, "v").transpose(0, 1)
                mapped_v = keep_sink(mapped_v, v, pair)
            native = attend(pair, layer, k, v) @ projection
            mapped = attend(pair, layer, mapped_k, mapped_v) @ projection
            distance = (mapped - native).square()
            error += float(distance.sum())
            # E (g . d)^2 / 2 for a direction of d that knows nothing of the gradient g
            felt += float(slopes[layer] @ distance.mean(-1)) / 2
            norm += float(native.square().sum())
            cosine += float(torch.cosine_similarity(mapped, native, dim=-1).sum())
            count += len(native)
        return Score(error / norm, cosine / count, felt / count)


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
