"""Refits of a ridge map that look at what attention makes of each token.

Two ways (arXiv 2609.00891), both a second set of sums beside the plain ones:

- attention repair: each row counts as much as the target's later queries feel an error in it,
  r_V(i) = sum a_i^2 and r_K(i) = sum a_i^2 |v_i - o|^2 |q|^2 / d over sampled queries q with
  attention a and output o, each query's mass made 1.
- attention-aware values: beside the rows themselves, the mixtures of rows that attention makes.

The weights differ for every target layer and head, so that these sums cannot come from the
moments: they take a second pass over the documents, and hold only what the map at hand reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from mapper.capture.pairs import Pair
from mapper.methods.base import AffineMap, CacheMap
from mapper.methods.blocks import BlockMap, block_columns
from mapper.methods.ridge import System, equations, head_columns
from mapper.moments import KINDS, Moments

Fitted = AffineMap | BlockMap
Refit = Literal["repair", "attention"]
REFITS = get_args(Refit)
# Boundaries of a document whose next query is asked (log-spaced).
QUERIES = 32
# Share of the mixtures in an attention-aware fit of values.
MIXTURE_SHARE = 0.5


@dataclass
class Weighted:
    """Raw sums of weighted rows of one target head; `mass` is the sum of the weights, `squares`
    that of their squares, `rows` how many there were."""

    xx: torch.Tensor
    xy: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    mass: float = 0.0
    squares: float = 0.0
    rows: int = 0

    @classmethod
    def zeros(cls, inputs: int, outputs: int) -> Weighted:
        sizes = ((inputs, inputs), (inputs, outputs), (inputs,), (outputs,))
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))

    def add(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
        """Rows x [n, inputs], y [n, outputs] with weights [n]."""
        x, y, weights = x.double(), y.double(), weights.double()
        heavy = x * weights[:, None]
        self.xx.addmm_(heavy.T, x)
        self.xy.addmm_(heavy.T, y)
        self.x += heavy.sum(0)
        self.y += weights @ y
        self.mass += float(weights.sum())
        self.squares += float(weights.square().sum())
        self.rows += len(weights)


class AttendedSums:
    """Sums for all target layers and heads of one map, in memory (`attended_bytes`)."""

    def __init__(self, maps: CacheMap, method: Refit) -> None:
        self.maps, self.method = maps, method
        self.sums = {
            (kind, layer, head): Weighted.zeros(one.inputs_per_output, one.bias.shape[1])
            for kind in KINDS
            for layer, one in enumerate(getattr(maps, kind))
            for head in range(len(one.bias))
        }

    def add(self, pairs: Iterable[Pair], *, wide: bool) -> None:
        """Pairs with sampled queries; `wide` if the maps read `wide_inputs`."""
        for pair in pairs:
            features = pair.features(wide=wide)
            for layer in range(len(self.maps.k)):
                weights, attention = felt(pair, layer)
                for kind in KINDS:
                    inputs = getattr(self.maps, kind)[layer].inputs(features, kind)
                    targets = pair.target[kind][layer].transpose(0, 1)
                    for head, y in enumerate(targets):
                        x = inputs[min(head, len(inputs) - 1)]
                        rows = (x[1:], y[1:], weights[kind][head])
                        if kind == "v" and self.method == "attention":
                            rows = mixtures(x[1:], y[1:], attention[head])
                        self.sums[kind, layer, head].add(*rows)

    def solve(self, moments: Moments, *, ridge: float) -> CacheMap:
        """The same maps, refitted: plain sums and weighted ones together."""
        return CacheMap(
            *(
                [
                    self._layer(moments, kind, layer, one, ridge)
                    for layer, one in enumerate(getattr(self.maps, kind))
                ]
                for kind in KINDS
            ),
            self.maps.key_norms,
        )

    def _layer(self, moments: Moments, kind: str, layer: int, one: Fitted, ridge: float) -> Fitted:
        solved = []
        for head in range(len(one.bias)):
            sums = self.sums[kind, layer, head]
            outputs = layer * moments.shape.layer_width + head_columns(moments.shape, head)
            columns = block_columns(moments, one.blocks_read(head))
            plain = equations(moments, kind, columns, outputs)
            mixed = kind == "v" and self.method == "attention"
            share = MIXTURE_SHARE if mixed else repair_share(sums, len(columns))
            solved.append(_mixed(plain, sums, share).solve(ridge))
        weights = [weight for weight, _ in solved]
        joined = torch.stack(weights) if len(one.weight) > 1 else torch.cat(weights, dim=1)[None]
        bias = torch.stack([bias for _, bias in solved])
        return replace(one, weight=joined.view_as(one.weight).float(), bias=bias.float())


def attended_bytes(maps: CacheMap) -> int:
    layers = (*maps.k, *maps.v)
    return sum(
        8 * len(one.bias) * one.inputs_per_output * (one.inputs_per_output + one.bias.shape[1])
        for one in layers
    )


def felt(pair: Pair, layer: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights [kv_heads, tokens - 1] by kind with mean 1 for a layer's tokens past position 0, and
    its attention [kv_heads, queries, tokens - 1] on them."""
    queries, k, v = pair.native.queries[layer], pair.native.k[layer], pair.native.v[layer]
    sampled, _, width = queries.shape
    grouped = queries.view(sampled, k.shape[1], -1, width)
    logits = torch.einsum("uhgd,nhd->hgun", grouped, k)
    logits.masked_fill_(pair.positions > pair.native.query_positions[:, None], float("-inf"))
    attention = logits.softmax(-1)
    output = torch.einsum("hgun,nhd->hgud", attention, v)
    values = v.transpose(0, 1)[:, None]
    distance = torch.cdist(output, values.expand(-1, output.shape[1], -1, -1)).square()
    length = grouped.square().sum(-1).permute(1, 2, 0) / width
    squares = attention.square()
    shares = {"v": squares, "k": squares * distance * length[..., None]}
    weights = {}
    for kind, share in shares.items():
        mass = share[..., 1:].sum(1)
        per_query = mass / mass.sum(-1, keepdim=True).clamp_min(1e-30)
        total = per_query.sum(1)
        weights[kind] = total / total.mean(-1, keepdim=True)
    return weights, attention[..., 1:].flatten(1, 2)


def mixtures(
    x: torch.Tensor, y: torch.Tensor, attention: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that `attention` [queries, tokens] mixes, normalised to shares of 1 and weighted so that
    squared errors are those of the mixture itself (position 0 has the rest of the attention)."""
    share = attention.sum(-1).clamp_min(1e-6)
    mix = attention / share[:, None]
    return mix @ x, mix @ y, share.square()


def repair_share(sums: Weighted, columns: int) -> float:
    """The share of the weights that leaves enough effective rows: with w = 1 + share (r - 1) and
    n_eff = n / (1 + share^2 CV^2), n_eff stays at least min(n, 2 columns)."""
    mean = sums.mass / sums.rows
    variation = sums.squares / sums.rows / mean**2 - 1
    wanted = min(sums.rows, 2 * columns)
    return min(1.0, ((sums.rows / wanted - 1) / max(variation, 1e-12)) ** 0.5)


def _mixed(plain: System, weighted: Weighted, share: float) -> System:
    """(1 - share) plain + share weighted, each as means; centred anew."""
    own, other = (1 - share) / plain.rows, share / weighted.mass
    x = (1 - share) * plain.x_mean + other * weighted.x
    y = (1 - share) * plain.y_mean + other * weighted.y
    outer = plain.xx + plain.rows * torch.outer(plain.x_mean, plain.x_mean)
    cross = plain.xy + plain.rows * torch.outer(plain.x_mean, plain.y_mean)
    return replace(
        plain,
        xx=own * outer + other * weighted.xx - torch.outer(x, x),
        xy=own * cross + other * weighted.xy - torch.outer(x, y),
        x_mean=x,
        y_mean=y,
    )
