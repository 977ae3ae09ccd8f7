"""Continuations of one prompt on top of many caches: option likelihoods and greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from mapper.quality.batch import ALL_ROWS, CacheBatch
from mapper.quality.tasks.answers import repeats


@dataclass(frozen=True)
class Continuation:
    """Token ids that may follow a prompt; the first `unscored` of them are given, not judged."""

    ids: torch.Tensor
    unscored: int = 0


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation's scored tokens, and whether greedy decoding gives them."""

    logprob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class Spoken:
    """A greedy answer; `cut` by the limit of tokens, `looping` when it ends in repetitions."""

    text: str
    cut: bool
    looping: bool


def score(
    batch: CacheBatch,
    tail: torch.Tensor,
    start: int,
    continuations: Sequence[Continuation],
    rows: slice = ALL_ROWS,
) -> list[list[Likelihood]]:
    """Computes `tail` and all continuations in one pass; [row][continuation].

    Continuations stand side by side behind the tail, each at the positions right after it, and
    see the prompt, the tail and themselves.
    """
    parts = [tail, *(one.ids[:-1] for one in continuations)]
    sizes = [len(part) for part in parts]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    visible = torch.zeros(sum(sizes), sum(sizes), dtype=torch.bool)
    visible[:, : len(tail)] = True
    positions = torch.empty(sum(sizes), dtype=torch.long)
    for at, size in zip(starts, sizes, strict=True):
        own = slice(at, at + size)
        visible[own, own] = torch.ones(size, size, dtype=torch.bool).tril()
        positions[own] = start + (len(tail) if at else 0) + torch.arange(size)
    hidden = batch.run(torch.cat(parts), start, rows, positions=positions, visible=visible)
    # The state that predicts a continuation's first token is the tail's last one.
    before = torch.tensor([len(tail) - 1])
    predictors = [
        torch.cat((before, torch.arange(at, at + size)))[one.unscored :]
        for one, at, size in zip(continuations, starts[1:], sizes[1:], strict=True)
    ]
    wanted = [one.ids[one.unscored :] for one in continuations]
    counts = [len(one) for one in wanted]
    results = []
    for row in hidden:
        logprobs = batch.logprobs(row[torch.cat(predictors)])
        targets = torch.cat(wanted)
        chosen = logprobs.gather(1, targets[:, None])[:, 0].split(counts)
        greedy = (logprobs.argmax(-1) == targets).split(counts)
        results.append(
            [
                Likelihood(float(one.sum()), len(one), bool(same.all()))
                for one, same in zip(chosen, greedy, strict=True)
            ]
        )
    return results


def speak(
    batch: CacheBatch,
    tokenizer: PreTrainedTokenizerBase,
    tail: torch.Tensor,
    start: int,
    *,
    limit: int,
    stops: Sequence[str],
    rows: slice = ALL_ROWS,
) -> list[Spoken]:
    """Greedy answers of at most `limit` tokens, up to the first of `stops` or the end token."""
    step = batch.run(tail, start, rows)[:, -1]
    start += len(tail)
    spoken: list[list[int]] = [[] for _ in step]
    done: list[Spoken | None] = [None] * len(step)
    for count in range(limit):
        chosen = batch.logprobs(step).argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if done[row] is None:
                spoken[row].append(token)
                done[row] = _ended(spoken[row], tokenizer, stops)
        if None not in done or count == limit - 1:
            break
        step = batch.run(chosen[:, None], start + count, rows)[:, -1]
    return [
        end or Spoken(tokenizer.decode(ids), True, repeats(ids))
        for end, ids in zip(done, spoken, strict=True)
    ]


def _ended(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]
) -> Spoken | None:
    """The answer, if its last token ended it."""
    if ids[-1] == tokenizer.eos_token_id:
        return Spoken(tokenizer.decode(ids[:-1]).strip(), False, repeats(ids[:-1]))
    # A stop counts after the first word: some models begin their answers with a line break.
    text = tokenizer.decode(ids).lstrip()
    ends = [at for stop in stops if (at := text.find(stop, 1)) > 0]
    return Spoken(text[: min(ends)].strip(), False, repeats(ids)) if ends else None
