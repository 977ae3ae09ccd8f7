"""Coordinates in which every block of a source's features has unit covariance, to train linear maps in.

The channels of keys differ in variance by orders of magnitude. An optimiser that takes steps of one size in every
coefficient hardly moves what reads the quiet ones; in these coordinates all of them count alike (the input side of
K-FAC, Martens and Grosse 2015, with each source layer's head as a block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from mapper.methods.base import AffineMap, Features
from mapper.methods.blocks import BlockMap

LinearMap = AffineMap | BlockMap
# Variance added to each direction, relative to the block's mean one: nothing quieter is amplified.
FLOOR = 1e-3


class Whitening:
    """Fitted to rows of features: `enter` and `leave` change a map's coordinates, not what it computes."""

    def __init__(self, samples: Iterable[Features]) -> None:
        count, sums, products = 0, {}, {}
        for features in samples:
            for kind, part in features.items():
                rows = part.double().permute(0, 2, 1, 3)  # [heads, layers, rows, head_dim]
                sums[kind] = sums.get(kind, 0) + rows.sum(2)
                products[kind] = products.get(kind, 0) + rows.mT @ rows
            count += part.shape[1]
        self.mean, self.root, self.inverse = {}, {}, {}
        for kind, total in sums.items():
            mean = total / count
            covariance = products[kind] / count - mean[..., :, None] * mean[..., None, :]
            spread = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            # A block that never changes is left as it is.
            spread = torch.where(spread > 0, spread, 1.0)
            covariance += FLOOR * spread * torch.eye(mean.shape[-1], dtype=torch.float64)
            root = torch.linalg.cholesky(covariance)
            self.mean[kind], self.root[kind] = mean, root
            self.inverse[kind] = torch.linalg.inv(root)

    def features(self, features: Features) -> dict[str, torch.Tensor]:
        """The same rows in the new coordinates, [heads, rows, layers, head_dim] as before."""
        return {
            kind: torch.einsum(
                "hrld,hled->hrle",
                part.float() - self.mean[kind].float()[:, None],
                self.inverse[kind].float(),
            ).to(part.dtype)
            for kind, part in features.items()
        }

    def enter(self, layer_map: LinearMap, kind: str) -> LinearMap:
        weight = _by_block(layer_map, lambda layer, head: self.root[kind][head, layer].mT)
        return replace(layer_map, weight=weight, bias=layer_map.bias + self._shift(layer_map, kind))

    def leave(self, layer_map: LinearMap, kind: str) -> LinearMap:
        weight = _by_block(layer_map, lambda layer, head: self.inverse[kind][head, layer].mT)
        back = replace(layer_map, weight=weight)
        return replace(back, bias=back.bias - self._shift(back, kind))

    def _shift(self, layer_map: LinearMap, kind: str) -> torch.Tensor:
        """What the map makes of the mean row, [kv_heads, head_dim]."""
        shifts = [
            torch.cat(
                [self.mean[kind][head, layer] for layer, head in layer_map.blocks_read(group)]
            )
            @ weight.double()
            for group, weight in enumerate(layer_map.weight)
        ]
        return torch.cat(shifts).view_as(layer_map.bias).float()


def _by_block(layer_map: LinearMap, factor: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The weight with the rows of each (source layer, source head) multiplied from the left."""
    size = layer_map.bias.shape[1]
    groups = []
    for group, weight in enumerate(layer_map.weight):
        blocks = weight.double().split(size)
        parts = [
            factor(layer, head) @ block
            for (layer, head), block in zip(layer_map.blocks_read(group), blocks, strict=True)
        ]
        groups.append(torch.cat(parts))
    return torch.stack(groups).float()
