"""Turns dialogues and prose into rows of token ids of one length, for pruning, training and measuring."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .dialogues import DIALOGUES_FILE, load_dialogues, load_prose


def dialogue_rows(
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    length: int,
    temperature: float | None = None,
    path: Path = DIALOGUES_FILE,
) -> torch.Tensor:
    rendered = [
        tokenizer.apply_chat_template(messages, tokenize=False)
        for messages in load_dialogues(split, path, temperature)
    ]
    return _pack(tokenizer, rendered, length)


def prose_rows(tokenizer: PreTrainedTokenizerBase, split: str, length: int) -> torch.Tensor:
    return _pack(tokenizer, [text + "\n\n" for text in load_prose(split)], length)


def file_rows(tokenizer: PreTrainedTokenizerBase, path: Path, length: int) -> torch.Tensor:
    return _pack(tokenizer, [path.read_text()], length)


def _pack(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int) -> torch.Tensor:
    """All texts one after the other, cut into rows; the incomplete last row is left out."""
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False).input_ids]
    count = len(ids) // length
    return torch.tensor(ids[: count * length], dtype=torch.long).reshape(count, length)


def answer_positions(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> torch.Tensor:
    """Which positions of packed dialogue rows [rows, length] predict a token that an assistant's turn had sampled."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer("assistant", add_special_tokens=False).input_ids
    places = torch.arange(ids.shape[1]).expand_as(ids)
    opened, closed = (
        torch.where(ids == mark, places, -1).cummax(1).values for mark in (start, end)
    )
    role = ids.gather(1, (opened + 1).clamp(max=ids.shape[1] - 1))
    # the role and the line break after it are the template's; a row that begins inside a turn tells no role
    return (opened > closed) & (role == assistant[0]) & (places > opened + len(assistant))


class Mixture:
    """Endless batches in which each source has a fixed share and no row returns before all others were drawn.

    A batch is its rows [rows, length] and the source of each.

    The draws depend on the seed alone, so that a resumed run goes on with the rows it would have seen.
    """

    def __init__(
        self, sources: dict[str, tuple[torch.Tensor, float]], rows: int, seed: int
    ) -> None:
        self.sources = sources
        self.rows = rows
        self.chooser = random.Random(seed)
        self.left: dict[str, list[int]] = {name: [] for name in sources}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        names = list(self.sources)
        shares = [share for _, share in self.sources.values()]
        while True:
            chosen = self.chooser.choices(names, shares, k=self.rows)
            yield torch.stack([self._row(name) for name in chosen]), chosen

    def _row(self, name: str) -> torch.Tensor:
        rows, _ = self.sources[name]
        if not self.left[name]:
            self.left[name] = list(range(len(rows)))
            self.chooser.shuffle(self.left[name])
        return rows[self.left[name].pop()]
