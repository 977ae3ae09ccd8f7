"""Block maps: each target head reads the heads of any source layers that serve it best.

Head-local maps (arXiv 2609.00891) assume that head h of one model corresponds to head h of the
other, all-head maps (arXiv 2608.03893) spend kv_heads times the coefficients on not assuming it.
Here the (layer, head) blocks that a target head reads are chosen one after the other by how much
each lowers the squared error that is left (block orthogonal matching pursuit), from the moments.
A block map with m blocks a head has as many coefficients as a head-local one with k = m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapper.methods.base import Features
from mapper.methods.ridge import equations, head_columns
from mapper.moments import Moments

Block = tuple[int, int]


@dataclass(frozen=True)
class BlockMap:
    """y_h = [x_b for b in blocks[h]] W_h + b_h. `blocks` are (source layer, source head), as many
    for each target head, layers numbered as an `AffineMap`'s; `weight` [kv_heads, m * head_dim, head_dim], `bias` [kv_heads, head_dim].
    """

    blocks: tuple[tuple[Block, ...], ...]
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(layer for chosen in self.blocks for layer, _ in chosen)

    @property
    def inputs_per_output(self) -> int:
        return self.weight.shape[1]

    def blocks_read(self, head: int) -> tuple[Block, ...]:
        """(source layer, source head) of the inputs of one target head, in their order."""
        return self.blocks[head]

    def inputs(self, features: Features, kind: str) -> torch.Tensor:
        """[kv_heads, rows, inputs per output]."""
        source = features[kind]
        rows = [
            torch.cat([source[head, :, layer] for layer, head in chosen], dim=1)
            for chosen in self.blocks
        ]
        return torch.stack(rows)

    def __call__(self, features: Features, kind: str) -> torch.Tensor:
        return torch.bmm(self.inputs(features, kind), self.weight).float() + self.bias[:, None]

    def to(self, device: str, dtype: torch.dtype) -> BlockMap:
        return BlockMap(self.blocks, self.weight.to(device, dtype), self.bias.float().to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.float().contiguous(), "bias": self.bias.float().contiguous()}


class BlockSearch:
    """The greedy choice of blocks for all outputs of one kind; whitens each block once."""

    def __init__(self, moments: Moments, kind: str, ridge: float) -> None:
        shape = moments.shape
        self.moments, self.kind, self.width = moments, kind, shape.head_dim
        self.names = [(s, h) for s in range(shape.inputs(kind)) for h in range(shape.kv_heads)]
        inputs = torch.arange(len(self.names) * self.width)
        outputs = torch.arange(shape.target_layers * shape.layer_width)
        whole = equations(moments, kind, inputs, outputs)
        count, width = len(self.names), self.width
        # In place: with wide inputs this is the largest tensor of a calibration, after the sums themselves.
        xx = whole.xx
        xx.diagonal().add_(ridge * whole.scale)
        own = torch.stack([xx[i : i + width, i : i + width] for i in range(0, len(xx), width)])
        whiten = torch.linalg.inv(torch.linalg.cholesky(own))
        for index in range(count):
            block = slice(index * width, (index + 1) * width)
            xx[block] = whiten[index] @ xx[block]
            xx[:, block] = xx[:, block] @ whiten[index].mT
        self.xx = xx.float()
        self.xy = torch.bmm(whiten, whole.xy.view(count, width, -1)).view_as(whole.xy).float()

    def path(self, target_layer: int, head: int, count: int) -> list[Block]:
        """The `count` blocks that one target head should read, the most useful first."""
        shape, width = self.moments.shape, self.width
        outputs = target_layer * shape.layer_width + head_columns(shape, head)
        left = self.xy[:, outputs].clone()
        basis = left.new_empty((0, len(left)))
        order: list[int] = []
        while len(order) < min(count, len(self.names)):
            gain = left.view(len(self.names), -1).square().sum(1)
            gain[order] = -1
            best = int(gain.argmax())
            own = slice(best * width, (best + 1) * width)
            rows = self.xx[own] - basis[:, own].mT @ basis
            # What the chosen blocks already explain of this one is all but singular at times.
            jitter = 1e-5 * torch.eye(width)
            factor = torch.linalg.cholesky(rows[:, own] + jitter)
            rows = torch.linalg.solve_triangular(factor, rows, upper=False)
            explained = torch.linalg.solve_triangular(factor, left[own], upper=False)
            left -= rows.mT @ explained
            basis = torch.cat((basis, rows))
            order.append(best)
        return [self.names[index] for index in order]


def fit_blocks(
    moments: Moments,
    kind: str,
    blocks: Sequence[Sequence[Block]],
    target_layer: int,
    *,
    ridge: float,
) -> BlockMap:
    """The ridge map that reads these blocks, by target head."""
    shape = moments.shape
    chosen = tuple(tuple(sorted(head)) for head in blocks)
    solved = [
        equations(
            moments,
            kind,
            block_columns(moments, head),
            target_layer * shape.layer_width + head_columns(shape, index),
        ).solve(ridge)
        for index, head in enumerate(chosen)
    ]
    weight = torch.stack([weight for weight, _ in solved]).float()
    return BlockMap(chosen, weight, torch.stack([bias for _, bias in solved]).float())


def block_columns(moments: Moments, blocks: Sequence[Block]) -> torch.Tensor:
    shape = moments.shape
    starts = [layer * shape.layer_width + head * shape.head_dim for layer, head in blocks]
    return (torch.tensor(starts)[:, None] + torch.arange(shape.head_dim)).flatten()
