"""Streamed second moments of paired caches: what every closed-form map is fitted from.

Sums of x x', x y', x, y and y^2 in fp64 over the tokens of all documents. They add, so that
several processes or machines can each see a part of the text (arXiv 2608.03893, section 3,
fits from the same sums). fp32 sums go indefinite well before 100,000 tokens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mapper.errors import CalibrationError

KINDS = ("k", "v")
# Parts of wide inputs, each as many layers as the source has.
PARTS = {"k": 4, "v": 2}
_FORMAT = "baton-moments-2"


@dataclass(frozen=True)
class PairShape:
    """The numbers that two caches' moments depend on.

    `wide`: inputs are all of `wide_inputs` (`methods/base.py`), not only keys for keys and values for values.
    """

    source_layers: int
    target_layers: int
    kv_heads: int
    head_dim: int
    wide: bool = False

    @property
    def layer_width(self) -> int:
        return self.kv_heads * self.head_dim

    def inputs(self, kind: str) -> int:
        """Layers that a map of this kind may read, each part of wide inputs counted."""
        return self.source_layers * (PARTS[kind] if self.wide else 1)

    def outputs(self, kind: str, *, both: bool) -> int:
        """Target layers, and for both directions what the other one's maps may read."""
        return self.reverse.inputs(kind) if both else self.target_layers

    def bytes(self, *, head_local: bool = False, both: bool = False) -> int:
        """fp64 bytes of one `Moments`, whatever the number of documents.

        Sums for head-local maps alone are `kv_heads` times smaller; sums for both directions
        hold the target's outer products as well.
        """
        groups, total = self.kv_heads if head_local else 1, 0
        for kind in KINDS:
            layers = self.inputs(kind), self.outputs(kind, both=both)
            x, y = (n * self.layer_width // groups for n in layers)
            total += 8 * groups * (x * x + x * y + (y * y if both else 0) + x + 2 * y)
        return total

    @property
    def reverse(self) -> PairShape:
        return replace(self, source_layers=self.target_layers, target_layers=self.source_layers)


@dataclass
class Sums:
    """Sums over rows x [groups, source columns], y [groups, target columns].

    One group of all heads, its columns in the order (layer, head, dimension), or one group a
    head, (layer, dimension). `outer`, the sum of y y', is there only for the other direction.
    """

    xx: torch.Tensor
    xy: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    yy: torch.Tensor
    outer: torch.Tensor | None = None

    @classmethod
    def zeros(cls, shape: PairShape, kind: str, *, head_local: bool, both: bool) -> Sums:
        g = shape.kv_heads if head_local else 1
        layers = shape.inputs(kind), shape.outputs(kind, both=both)
        x, y = (n * shape.layer_width // g for n in layers)
        sizes = [(g, x, x), (g, x, y), (g, x), (g, y), (g, y)] + ([(g, y, y)] if both else [])
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.double(), y.double()
        self.xx.baddbmm_(x.mT, x)
        self.xy.baddbmm_(x.mT, y)
        self.x += x.sum(1)
        self.y += y.sum(1)
        self.yy += y.square().sum(1)
        if self.outer is not None:
            self.outer.baddbmm_(y.mT, y)

    def reverse(self) -> Sums:
        if self.outer is None:
            raise CalibrationError("these moments are of one direction; calibrate the other one")
        squares = self.xx.diagonal(dim1=1, dim2=2)
        return Sums(self.outer, self.xy.mT, self.y, self.x, squares, self.xx)

    def merge(self, other: Sums) -> None:
        for name, tensor in self.parts.items():
            tensor.add_(other.parts[name])


@dataclass
class Moments:
    """The sums of keys (un-rotated) and values, and which documents they came from.

    `documents` maps a document's digest to its tokens; a document is never counted twice.
    """

    shape: PairShape
    pair: str
    rows: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    head_local: bool = False

    @classmethod
    def empty(
        cls, shape: PairShape, pair: str, *, head_local: bool = False, both: bool = False
    ) -> Moments:
        """`head_local`: of what head-local maps need alone. `both`: for both directions."""
        sums = {kind: Sums.zeros(shape, kind, head_local=head_local, both=both) for kind in KINDS}
        return cls(shape, pair, sums=sums, head_local=head_local)

    @property
    def both(self) -> bool:
        return self.sums["k"].outer is not None

    def holds(self, shape: PairShape, *, head_local: bool, both: bool) -> bool:
        """Whether the sums for `shape` are among these: those of one direction are among those of
        both, of narrow inputs among those of wide ones, within heads among those of all heads."""
        return (
            replace(self.shape, wide=shape.wide) == shape
            and self.shape.wide >= shape.wide
            and self.head_local <= head_local
            and self.both >= both
        )

    def reduced(self, shape: PairShape, *, head_local: bool, both: bool) -> Moments:
        """The same without what `shape` does not need; these must hold it."""
        groups = self.shape.kv_heads if self.head_local else 1
        sums = {}
        for kind, one in self.sums.items():
            # The own part of wide inputs comes first, and so do the outputs of one direction.
            layers = shape.inputs(kind), shape.outputs(kind, both=both)
            x, y = (slice(n * shape.layer_width // groups) for n in layers)
            parts = {
                "xx": one.xx[:, x, x],
                "xy": one.xy[:, x, y],
                "x": one.x[:, x],
                "y": one.y[:, y],
                "yy": one.yy[:, y],
            }
            if both:
                parts["outer"] = one.outer[:, y, y]
            if head_local and not self.head_local:
                parts = {name: self._within_heads(part) for name, part in parts.items()}
            sums[kind] = Sums(**parts)
        return replace(self, shape=shape, sums=sums, head_local=head_local)

    def reverse(self, pair: str) -> Moments:
        """The other direction's, from the same pass; shares memory with these.

        Raises:
            CalibrationError: they were accumulated for one direction only.
        """
        sums = {kind: one.reverse() for kind, one in self.sums.items()}
        return Moments(
            self.shape.reverse, pair, self.rows, dict(self.documents), sums, self.head_local
        )

    def add(
        self,
        document: str,
        source: dict[str, torch.Tensor],
        target: dict[str, torch.Tensor],
        tokens: int,
    ) -> None:
        """Adds rows of one document: tensors [layers, rows, kv_heads, head_dim] by kind, `wide_inputs` if the shape is
        wide.

        Raises:
            CalibrationError: a value is not finite (one would spoil every sum).
        """
        if document in self.documents:
            return
        for kind in KINDS:
            if not (source[kind].isfinite().all() and target[kind].isfinite().all()):
                raise CalibrationError(f"document {document} has non-finite {kind}; take it out")
        for kind in KINDS:
            wanted = target[kind][: self.shape.outputs(kind, both=self.both)]
            self.sums[kind].add(self._rows(source[kind]), self._rows(wanted))
        self.rows += source["k"].shape[1]
        self.documents[document] = tokens

    def merge(self, other: Moments) -> None:
        """Adds the moments of other documents of the same pair.

        Raises:
            CalibrationError: another pair, or a document that both have seen.
        """
        mine, theirs = ((one.pair, one.shape, one.head_local, one.both) for one in (self, other))
        if mine != theirs:
            raise CalibrationError(f"moments of {theirs} cannot join those of {mine}")
        twice = self.documents.keys() & other.documents.keys()
        if twice:
            raise CalibrationError(
                f"{len(twice)} documents are in both moments; give each process its own part"
            )
        for kind in KINDS:
            self.sums[kind].merge(other.sums[kind])
        self.rows += other.rows
        self.documents.update(other.documents)

    def save(self, path: Path) -> None:
        """Writes a checkpoint that a crash cannot leave half done."""
        tensors = {
            f"{kind}.{name}": tensor.contiguous()
            for kind in KINDS
            for name, tensor in self.sums[kind].parts.items()
        }
        header = {
            "format": _FORMAT,
            "pair": self.pair,
            "shape": json.dumps(vars(self.shape)),
            "rows": str(self.rows),
            "documents": json.dumps(self.documents),
            "head_local": json.dumps(self.head_local),
        }
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, metadata=header)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.rename(path)

    @classmethod
    def load(cls, path: Path) -> Moments:
        """
        Raises:
            CalibrationError: not a moments file, or one of another version.
        """
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                if header.get("format") != _FORMAT:
                    raise CalibrationError(f"{path} holds no moments of the format {_FORMAT}")
                shape = PairShape(**json.loads(header["shape"]))
                names = set(file.keys())
                sums = {
                    kind: Sums(
                        **{
                            part.name: file.get_tensor(f"{kind}.{part.name}")
                            for part in fields(Sums)
                            if f"{kind}.{part.name}" in names
                        }
                    )
                    for kind in KINDS
                }
        except CalibrationError:
            raise
        except Exception as error:  # safetensors raises its own and OS errors alike
            raise CalibrationError(f"{path} cannot be read as moments: {error}") from error
        return cls(
            shape,
            header["pair"],
            int(header["rows"]),
            json.loads(header["documents"]),
            sums,
            json.loads(header["head_local"]),
        )

    def _within_heads(self, sums: torch.Tensor) -> torch.Tensor:
        """[1, columns] or [1, columns, columns] of all heads -> [heads, ...] of each head's own."""
        by_head = (-1, self.shape.kv_heads, self.shape.head_dim)
        if sums.dim() == 2:
            return sums[0].unflatten(0, by_head).transpose(0, 1).flatten(1)
        blocks = sums[0].unflatten(1, by_head).unflatten(0, by_head).diagonal(dim1=1, dim2=4)
        return blocks.permute(4, 0, 1, 2, 3).flatten(3, 4).flatten(1, 2)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[layers, rows, heads, head_dim] -> [groups, rows, columns]."""
        if self.head_local:
            return tensor.permute(2, 1, 0, 3).flatten(2)
        return tensor.transpose(0, 1).flatten(1)[None]
