"""Paired caches of the same tokens, whichever way they were obtained."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from mapper.capture.model import CapturedModel, Prefill
from mapper.capture.texts import Document
from mapper.methods.base import as_features, wide_inputs
from mapper.rotary import Rotary

# Positions of a document whose queries are kept.
Sampler = Callable[[Document], torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """Both models' caches of one document, [layers, tokens, kv_heads, head_dim].

    `source` and `target` hold un-rotated keys ("k") and values ("v"); `native` is the
    target's prefill as cached, with its sampled queries.
    """

    digest: str
    source: dict[str, torch.Tensor]
    target: dict[str, torch.Tensor]
    positions: torch.Tensor
    native: Prefill

    def rows(
        self, stride: int, *, wide: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Every `stride`-th token of both sides, never position 0: the attention sink's cache
        is unlike any other token's, and it is not mapped. With `wide`, they are `wide_inputs`, and a token
        whose predecessor is not in the pair is left out."""
        start = int(self.digest[:8], 16) % stride
        chosen = torch.arange(start, len(self.positions), stride)
        there = self.positions > 0
        if wide:
            there[1:] &= self.positions.diff() == 1
            there[0] = False
        chosen = chosen[there[chosen]]

        def of(side: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            inputs = wide_inputs(side["k"], side["v"]) if wide else side
            return {kind: rows[:, chosen] for kind, rows in inputs.items()}

        return of(self.source), of(self.target)

    def features(self, *, wide: bool) -> dict[str, torch.Tensor]:
        """What maps read of the source; with `wide`, three times as much."""
        return as_features(wide_inputs(self.source["k"], self.source["v"]) if wide else self.source)


@dataclass(frozen=True)
class StoredPair:
    """Pages of both workers that hold the same tokens in the same context: exact on both sides.

    k, v as cached, [layers, tokens, kv_heads, head_dim]; `positions` and `token_ids` [tokens].
    """

    source: tuple[torch.Tensor, torch.Tensor]
    target: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    token_ids: torch.Tensor

    def pair(self, rotaries: tuple[Rotary, Rotary]) -> Pair:
        k = self.source[0].contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(k).hexdigest()[:16]
        return pair(digest, Prefill(*self.source), Prefill(*self.target), self.positions, rotaries)


def capture(
    source: CapturedModel,
    target: CapturedModel,
    documents: Iterable[Document],
    sample: Sampler | None = None,
) -> Iterator[Pair]:
    """Prefills each document on both models; keeps the target's queries at the positions that
    `sample` names."""
    for document in documents:
        sampled = None if sample is None else sample(document)
        yield pair(
            document.digest,
            source.prefill(document.ids),
            target.prefill(document.ids, sampled),
            torch.arange(len(document.ids)),
            (source.rotary, target.rotary),
        )


def pair(
    digest: str,
    source: Prefill,
    target: Prefill,
    positions: torch.Tensor,
    rotaries: tuple[Rotary, Rotary],
) -> Pair:
    """Undoes both rotations."""
    return Pair(
        digest,
        {"k": rotaries[0].undo(source.k, positions), "v": source.v},
        {"k": rotaries[1].undo(target.k, positions), "v": target.v},
        positions,
        target,
    )


def evenly(count: int) -> Sampler:
    """`count` positions spread over a document, past its first tokens."""

    def positions(document: Document) -> torch.Tensor:
        last = len(document.ids) - 1
        return torch.linspace(min(8, last), last, count).round().long().unique()

    return positions


def asked(count: int) -> Sampler:
    """Of quotes (`capture/recall.py`) `count` positions where their answers begin, else evenly spread ones: what has to
    be found far above is asked for there, and hardly anywhere else."""

    def positions(document: Document) -> torch.Tensor:
        if document.kind != "recall" or not document.answers:
            return evenly(count)(document)
        each = -(-count // len(document.answers))
        places = torch.tensor(document.answers)[:, None] - 1 + torch.arange(each)
        return places.flatten().clamp(max=len(document.ids) - 1).unique()

    return positions


def log_spaced(count: int) -> Sampler:
    """`count` positions whose distances grow with the prefix before them."""

    def positions(document: Document) -> torch.Tensor:
        last = len(document.ids) - 1
        places = torch.logspace(3, math.log2(max(last, 8)), count, base=2)
        return places.long().clamp(1, last).unique()

    return positions
