"""A prompt in every arm's cache: what two prompts share is prefilled and mapped once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from mapper.capture.model import CapturedModel
from mapper.quality.arms import KV, Arm, Span
from mapper.quality.batch import CacheBatch
from mapper.rotary import Rotary

# Longest run of tokens that the native splice computes at once; no divisor of a usual length.
SPLICE_TOKENS = 83


class Reader:
    """Both models and the arms' caches, at the prompt loaded last.

    `arms[0]` is the native one. Arms that are judged on a part of the questions only come last.
    """

    def __init__(
        self,
        source: CapturedModel,
        target: CapturedModel,
        arms: Sequence[Arm],
        capacity: int,
        foreign: KV,
    ) -> None:
        """`foreign`: the source's cache of other text; it is repeated as far as is needed."""
        self.arms = list(arms)
        self.source = CacheBatch(source, 1, capacity)
        self.native = CacheBatch(target, 1, capacity)
        self.again = CacheBatch(target, 1, capacity)
        self.batch = CacheBatch(target, len(self.arms), capacity)
        self._foreign = _as_long(foreign, capacity, source.rotary)
        self._ids = torch.empty(0, dtype=torch.long)
        # How far each arm's cache, and the one computed again, hold the ids above.
        self._valid = [0] * len(self.arms)
        self._again_valid = 0

    def load(self, ids: torch.Tensor, active: int | None = None) -> None:
        """Makes the caches of both models and of the first `active` arms hold `ids` [tokens]."""
        active = active or len(self.arms)
        common = _common(self._ids, ids)
        self.keep(common)
        if common < len(ids):
            for batch in (self.source, self.native):
                batch.run(ids[common:], common)
        self._ids = ids
        spans = {
            start: self._span(start, len(ids))
            for start in set(self._valid[:active])
            if start < len(ids)
        }
        for row, arm in enumerate(self.arms[:active]):
            start = self._valid[row]
            if start < len(ids):
                self.batch.write(row, start, *arm.cache(spans[start]))
                self._valid[row] = len(ids)

    def keep(self, tokens: int) -> None:
        """Forgets the loaded prompt past its first `tokens`: continuations were computed there."""
        self._ids = self._ids[:tokens]
        self._valid = [min(valid, tokens) for valid in self._valid]
        self._again_valid = min(self._again_valid, tokens)

    def _span(self, start: int, stop: int) -> Span:
        @cache
        def again() -> KV:
            for at in range(self._again_valid, stop, SPLICE_TOKENS):
                self.again.run(self._ids[at : min(at + SPLICE_TOKENS, stop)], at)
            self._again_valid = stop
            return self.again.read(start, stop)

        before = max(start - 1, 0)
        return Span(
            self._ids[:stop],
            start,
            source=self.source.read(start, stop),
            native=self.native.read(start, stop),
            foreign=tuple(part[:, start:stop] for part in self._foreign),
            source_before=self.source.read(before, start),
            foreign_before=tuple(part[:, before:start] for part in self._foreign),
            again=again,
        )


def _as_long(cache: KV, capacity: int, rotary: Rotary) -> KV:
    """`cache` repeated, each key at the position where it stands now. Its first token, the attention sink, comes once."""
    k, v = cache
    length, at = k.shape[1], torch.arange(capacity)
    rows = torch.where(at < length, at, 1 + (at - length) % (length - 1))
    unrotated = rotary.undo(k, torch.arange(length))[:, rows]
    return rotary.apply(unrotated, at), v[:, rows]


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens at the start are the same."""
    size = min(len(one), len(other))
    differ = (one[:size] != other[:size]).nonzero()
    return int(differ[0]) if len(differ) else size
