"""Streamed second moments of paired caches: what every closed-form map is fitted from.

Sums of x x', x y', x, y and y^2 in fp64 over the tokens of all documents. They add, so that
several processes or machines can each see a part of the text (arXiv 2608.03893, section 3,
fits from the same sums). fp32 sums go indefinite well before 100,000 tokens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mapper.errors import CalibrationError

KINDS = ("k", "v")
_FORMAT = "baton-moments-1"


@dataclass(frozen=True)
class PairShape:
    """The numbers that two caches' moments depend on."""

    source_layers: int
    target_layers: int
    kv_heads: int
    head_dim: int

    @property
    def layer_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def bytes(self) -> int:
        """fp64 bytes of one `Moments`, whatever the number of documents."""
        x = self.source_layers * self.layer_width
        y = self.target_layers * self.layer_width
        return 2 * 8 * (x * x + x * y + x + 2 * y)


@dataclass
class Sums:
    """Sums over rows x [source_layers * kv_heads * head_dim], y [target_layers * ...]."""

    xx: torch.Tensor
    xy: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    yy: torch.Tensor

    @classmethod
    def zeros(cls, shape: PairShape) -> Sums:
        x, y = shape.source_layers * shape.layer_width, shape.target_layers * shape.layer_width
        sizes = ((x, x), (x, y), (x,), (y,), (y,))
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.double(), y.double()
        self.xx.addmm_(x.T, x)
        self.xy.addmm_(x.T, y)
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.yy += y.square().sum(0)

    def merge(self, other: Sums) -> None:
        for part in fields(self):
            getattr(self, part.name).add_(getattr(other, part.name))


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

    @classmethod
    def empty(cls, shape: PairShape, pair: str) -> Moments:
        return cls(shape, pair, sums={kind: Sums.zeros(shape) for kind in KINDS})

    def add(
        self,
        document: str,
        source: dict[str, torch.Tensor],
        target: dict[str, torch.Tensor],
        tokens: int,
    ) -> None:
        """Adds rows of one document: tensors [layers, rows, kv_heads, head_dim] by kind.

        Raises:
            CalibrationError: a value is not finite (one would spoil every sum).
        """
        if document in self.documents:
            return
        for kind in KINDS:
            if not (source[kind].isfinite().all() and target[kind].isfinite().all()):
                raise CalibrationError(f"document {document} has non-finite {kind}; take it out")
        for kind in KINDS:
            self.sums[kind].add(_rows(source[kind]), _rows(target[kind]))
        self.rows += source["k"].shape[1]
        self.documents[document] = tokens

    def merge(self, other: Moments) -> None:
        """Adds the moments of other documents of the same pair.

        Raises:
            CalibrationError: another pair, or a document that both have seen.
        """
        if (self.pair, self.shape) != (other.pair, other.shape):
            raise CalibrationError(f"moments of {other.pair} cannot join those of {self.pair}")
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
            f"{kind}.{part.name}": getattr(self.sums[kind], part.name)
            for kind in KINDS
            for part in fields(Sums)
        }
        header = {
            "format": _FORMAT,
            "pair": self.pair,
            "shape": json.dumps(vars(self.shape)),
            "rows": str(self.rows),
            "documents": json.dumps(self.documents),
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
                sums = {
                    kind: Sums(*(file.get_tensor(f"{kind}.{part.name}") for part in fields(Sums)))
                    for kind in KINDS
                }
        except CalibrationError:
            raise
        except Exception as error:  # safetensors raises its own and OS errors alike
            raise CalibrationError(f"{path} cannot be read as moments: {error}") from error
        return cls(
            shape, header["pair"], int(header["rows"]), json.loads(header["documents"]), sums
        )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[layers, rows, heads, head_dim] -> [rows, layers * heads * head_dim]."""
    return tensor.transpose(0, 1).flatten(1)
