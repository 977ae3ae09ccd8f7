"""KL per token and top-1 agreement of the target's answers on other caches against its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mapper.quality.conversations import Conversation
from mapper.quality.reader import Reader
from mapper.quality.statistics import figure, resample

# By arm, then by native tail.
Divergences = dict[str, dict[int, "Divergence"]]
SOURCE = "source alone"


@dataclass
class Divergence:
    """Sums for each conversation: `kl` in nats, tokens, and tokens with the same argmax."""

    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, native: torch.Tensor, other: torch.Tensor) -> None:
        """Log-probabilities [tokens, vocabulary] of both."""
        self.kl.append(float((native.exp() * (native - other)).sum()))
        self.agree.append(int((native.argmax(-1) == other.argmax(-1)).sum()))
        self.tokens.append(len(native))

    def summary(self) -> dict[str, float | list[float]]:
        """Means per token, each with a 95 % interval bootstrapped over conversations."""
        draws = resample(len(self.tokens))
        result = {"conversations": len(self.tokens), "tokens": sum(self.tokens)}
        for name, sums in (("kl", self.kl), ("top1", self.agree)):
            one = figure(_per_token(sums, self.tokens, draws))
            result |= {name: one["value"], f"{name}_interval": one["interval"]}
        return result

    def kl_over(self, other: Divergence) -> dict[str, float | list[float] | None]:
        """This KL divided by another's, on the conversations that both were measured on."""
        both = min(len(self.tokens), len(other.tokens))
        draws = resample(both)
        mine = _per_token(self.kl[:both], self.tokens[:both], draws)
        theirs = _per_token(other.kl[:both], other.tokens[:both], draws)
        with np.errstate(divide="ignore", invalid="ignore"):
            return figure(mine / theirs)


def _per_token(sums: Sequence[float], tokens: Sequence[int], draws: np.ndarray) -> np.ndarray:
    return np.array(sums, dtype=float)[draws].sum(1) / np.array(tokens, dtype=float)[draws].sum(1)


def measure(
    reader: Reader,
    talks: Sequence[Conversation],
    *,
    tail: int,
    curve: Sequence[int],
    variants: int,
    extras: int,
    running: Callable[[], bool] = lambda: True,
) -> Divergences:
    """Answers of each conversation on top of every arm's cache of its prompt.

    Args:
        reader: its arms are the native one, `variants` variants, then floors and controls.
        tail: native tail that all variants are measured with, beside none.
        curve: native tails that the first variant is measured with.
        extras: how many conversations floors and controls are measured on; they get no tail.
        running: asked before each conversation; False ends the measurement.

    A tail of 1 is none: a server always computes the last token of a prompt itself.
    """
    found: Divergences = {arm.name: {1: Divergence()} for arm in reader.arms[1:]}
    found[SOURCE] = {1: Divergence()}
    # A longer tail overwrites more of the caches: the shortest first.
    lengths = sorted({1, tail, *curve})
    for length in lengths[1:]:
        for arm in reader.arms[1 : 1 + (variants if length == tail else 1)]:
            found[arm.name][length] = Divergence()
    for index, talk in enumerate(talks):
        if index and not running():
            break
        last = 1 + variants if index >= extras else len(reader.arms)
        reader.load(talk.ids[: talk.prompt - 1], last)
        native = None
        for length in lengths:
            start = max(talk.prompt - length, 1)
            arms = range(0, last) if length == 1 else range(1, last)
            arms = [row for row in arms if row == 0 or length in found[reader.arms[row].name]]
            hidden = reader.batch.run(
                talk.ids[start:-1], start, slice(arms[0], arms[-1] + 1)
            )[:, talk.prompt - 1 - start :]  # fmt: skip
            for row, states in zip(arms, hidden, strict=True):
                logprobs = reader.batch.logprobs(states)
                if row == 0:
                    native = logprobs
                else:
                    found[reader.arms[row].name][length].add(native, logprobs)
        states = reader.source.run(talk.ids[talk.prompt - 1 : -1], talk.prompt - 1)[0]
        found[SOURCE][1].add(native, reader.source.logprobs(states))
        reader.keep(max(0, talk.prompt - lengths[-1]))
    return found
