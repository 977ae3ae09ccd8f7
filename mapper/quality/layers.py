"""Layer by layer: R2 of mapped keys and values, and the cosine of attention outputs after W_O."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mapper.capture.model import CapturedModel, Prefill
from mapper.quality.conversations import Conversation
from mapper.quality.reader import Reader

# Last positions of a prompt whose queries are asked.
QUERIES = 16

LayerFigures = dict[str, dict[str, list[float]]]


@torch.inference_mode()
def by_layer(reader: Reader, talks: Sequence[Conversation], arms: Sequence[int]) -> LayerFigures:
    """`r2_k`, `r2_v` and `attention_cosine` of the arms in these rows, each [target_layers].

    R2 is that of un-rotated keys and of values, over all heads, without position 0.
    """
    target = reader.native.model
    sums = {row: _Sums(target) for row in arms}
    for talk in talks:
        size = talk.prompt - 1
        reader.load(talk.ids[:size], max(arms) + 1)
        at = torch.arange(max(1, size - QUERIES), size)
        asked = target.prefill(talk.ids[:size], at)
        for row in arms:
            sums[row].add(asked, *reader.batch.read(0, size, row))
    return {reader.arms[row].name: one.figures() for row, one in sums.items()}


class _Sums:
    def __init__(self, target: CapturedModel) -> None:
        self.target, self.projections = (
            target,
            [target.output_projection(layer).float() for layer in range(target.spec.layers)],
        )
        self.residual, self.total, self.cosine = {"k": 0, "v": 0}, {"k": 0, "v": 0}, 0
        self.queries = 0

    def add(self, native: Prefill, k: torch.Tensor, v: torch.Tensor) -> None:
        positions = torch.arange(k.shape[1])
        undo = self.target.rotary.undo
        own_k, own_v = native.k.float(), native.v.float()
        pairs = {"k": (undo(own_k, positions), undo(k, positions)), "v": (own_v, v)}
        for kind, (own, mapped) in pairs.items():
            own, mapped = own[:, 1:], mapped[:, 1:]
            self.residual[kind] += (own - mapped).square().sum((1, 2, 3))
            self.total[kind] += (own - own.mean(1, keepdim=True)).square().sum((1, 2, 3))
        queries = native.queries.float()
        outputs = zip(
            _attend(queries, native.query_positions, own_k, own_v),
            _attend(queries, native.query_positions, k, v),
            self.projections,
            strict=True,
        )
        cosines = [
            torch.cosine_similarity(own @ weight.T, mapped @ weight.T, dim=-1).sum()
            for own, mapped, weight in outputs
        ]
        self.cosine += torch.stack(cosines)
        self.queries += queries.shape[1]

    def figures(self) -> dict[str, list[float]]:
        figures = {
            f"r2_{kind}": (1 - self.residual[kind] / self.total[kind]).tolist() for kind in "kv"
        }
        return figures | {"attention_cosine": (self.cosine / self.queries).tolist()}


def _attend(
    queries: torch.Tensor, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """[layers, sampled, heads, dim] queries on caches [layers, tokens, kv_heads, dim] ->
    [layers, sampled, heads * dim]."""
    layers, sampled, _, width = queries.shape
    grouped = queries.view(layers, sampled, k.shape[2], -1, width)
    logits = torch.einsum("luhgd,lnhd->lhgun", grouped, k)
    logits.masked_fill_(torch.arange(k.shape[1]) > at[:, None], float("-inf"))
    return torch.einsum("lhgun,lnhd->luhgd", logits.softmax(-1), v).reshape(layers, sampled, -1)
