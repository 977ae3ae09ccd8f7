"""Ridge regression from moments: the published all-head map and the head-local one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapper.errors import CalibrationError
from mapper.methods.base import AffineMap
from mapper.moments import KINDS, Moments, PairShape


@dataclass(frozen=True)
class System:
    """Centred normal equations of one regression: xx [p, p], xy [p, q], yy [q], means; `parts` [p], which part of wide
    inputs each column is of."""

    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    rows: float
    parts: torch.Tensor

    @property
    def scale(self) -> torch.Tensor:
        """[p], what a ridge is relative to: the mean diagonal of xx over the columns of the same part. Keys vary by
        orders of magnitude more than values, which a common mean would all but switch off."""
        diagonal = self.xx.diagonal()
        totals = diagonal.new_zeros(int(self.parts.max()) + 1).index_add(0, self.parts, diagonal)
        return (totals / self.parts.bincount().clamp_min(1))[self.parts]

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """W [p, q] and b [q] in fp64 that minimise |xW + b - y|^2 + ridge * |W|^2, rows of W weighted by `scale`.

        Raises:
            CalibrationError: no more rows than columns, or the system is singular.
        """
        columns = self.xx.shape[0]
        require_rows(self.rows, columns)
        matrix = self.xx + torch.diag(ridge * self.scale)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed:
            raise CalibrationError(
                f"the moments are singular at ridge {ridge:g}: add text or raise the ridge"
            )
        weight = torch.cholesky_solve(self.xy, factor)
        return weight, self.y_mean - self.x_mean @ weight

    def r2(self, weight: torch.Tensor) -> torch.Tensor:
        """Share of each output's variance that `weight` explains on the fitted rows, [q]."""
        residual = self.yy - 2 * (weight * self.xy).sum(0) + (weight * (self.xx @ weight)).sum(0)
        return 1 - residual / self.yy.clamp_min(1e-30)


def require_rows(rows: float, columns: int) -> None:
    if rows <= columns:
        raise CalibrationError(
            f"{int(rows)} rows cannot fit {columns} coefficients an output: give more text "
            "(at least twice as many tokens), a smaller stride, a smaller k, or the head-local method"
        )


def system(
    moments: Moments, kind: str, layers: Sequence[int], target_layer: int, head: int | None
) -> System:
    """The equations of one target layer (and head) from the selected source layers."""
    shape = moments.shape
    outputs = target_layer * shape.layer_width + head_columns(shape, head)
    return equations(moments, kind, input_columns(shape, layers, head), outputs)


def equations(moments: Moments, kind: str, inputs: torch.Tensor, outputs: torch.Tensor) -> System:
    """Of columns in the order (layer, head, dimension), whichever way the moments keep them.

    Raises:
        CalibrationError: moments for head-local maps cannot say how heads relate.
    """
    sums, rows, group = moments.sums[kind], moments.rows, 0
    parts = inputs // (moments.shape.source_layers * moments.shape.layer_width)
    if moments.head_local:
        group, inputs, outputs = _within_head(moments.shape, inputs, outputs)
    x_mean, y_mean = sums.x[group, inputs] / rows, sums.y[group, outputs] / rows
    return System(
        xx=sums.xx[group][inputs[:, None], inputs].addr_(x_mean, x_mean, alpha=-rows),
        xy=sums.xy[group][inputs[:, None], outputs].addr_(x_mean, y_mean, alpha=-rows),
        yy=sums.yy[group, outputs] - rows * y_mean.square(),
        x_mean=x_mean,
        y_mean=y_mean,
        rows=rows,
        parts=parts,
    )


def _within_head(shape: PairShape, inputs: torch.Tensor, outputs: torch.Tensor):
    """The one head that all columns belong to, and the columns among that head's."""
    width, layer = shape.head_dim, shape.layer_width
    heads = {int(head) for part in (inputs, outputs) for head in (part % layer // width).unique()}
    if len(heads) != 1:
        raise CalibrationError("these moments are for head-local maps only; accumulate them anew")
    within = (part // layer * width + part % width for part in (inputs, outputs))
    return heads.pop(), *within


def fit_layer(
    moments: Moments,
    kind: str,
    layers: Sequence[int],
    target_layer: int,
    *,
    head_local: bool,
    ridge: float,
) -> AffineMap:
    """The ridge map of one target layer's keys or values.

    All-head: arXiv 2608.03893, section 3. Head-local: arXiv 2609.00891; an eighth of the
    coefficients at 8 KV heads.
    """
    shape = moments.shape
    layers = tuple(sorted(layers))
    heads = range(shape.kv_heads) if head_local else (None,)
    solved = [system(moments, kind, layers, target_layer, head).solve(ridge) for head in heads]
    return AffineMap(
        layers,
        torch.stack([weight for weight, _ in solved]).float(),
        torch.cat([bias for _, bias in solved]).view(shape.kv_heads, shape.head_dim).float(),
    )


def rank_layers(moments: Moments, *, head_local: bool) -> list[list[int]]:
    """For each target layer, the source layers from best to worst.

    By the affine R2 of a map from that source layer alone, averaged over heads and over
    keys and values (arXiv 2608.03893, section 3.2).
    """
    scores = layer_scores(moments, head_local=head_local)
    order = (scores["k"] + scores["v"]).argsort(dim=0, descending=True)
    return order.T.tolist()


def layer_scores(moments: Moments, *, head_local: bool) -> dict[str, torch.Tensor]:
    """R2 of each single-layer map by kind, [source_layers, target_layers]."""
    shape = moments.shape
    heads = range(shape.kv_heads) if head_local else (None,)
    scores = {kind: torch.zeros(shape.source_layers, shape.target_layers) for kind in KINDS}
    for kind in KINDS:
        for source_layer in range(shape.source_layers):
            for head in heads:
                one = _one_to_all(moments, kind, source_layer, head)
                weight, _ = one.solve(1e-6)
                r2 = one.r2(weight).view(shape.target_layers, -1).mean(1)
                scores[kind][source_layer] += (r2 / len(heads)).float()
    return scores


def _one_to_all(moments: Moments, kind: str, source_layer: int, head: int | None) -> System:
    """One source layer against all target layers: one factorisation for all of them."""
    shape = moments.shape
    starts = torch.arange(shape.target_layers)[:, None] * shape.layer_width
    outputs = (starts + head_columns(shape, head)).flatten()
    return equations(moments, kind, input_columns(shape, [source_layer], head), outputs)


def head_columns(shape: PairShape, head: int | None) -> torch.Tensor:
    """Columns of one head within a layer, or of all heads."""
    columns = torch.arange(shape.layer_width)
    return columns if head is None else columns.view(shape.kv_heads, -1)[head]


def input_columns(shape: PairShape, layers: Sequence[int], head: int | None) -> torch.Tensor:
    """Columns of x in a map's row order: (head, selected layer, dimension)."""
    there = max(layers) + 1
    columns = torch.arange(there * shape.layer_width).view(there, shape.kv_heads, shape.head_dim)
    chosen = columns[torch.tensor(tuple(layers))].transpose(0, 1)
    return chosen.flatten() if head is None else chosen[head].flatten()
