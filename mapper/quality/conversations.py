"""Conversations to score on: held-out dialogues chained until the prompt is long enough to matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mapper.capture.texts import render
from mapper.errors import CalibrationError


@dataclass(frozen=True)
class Conversation:
    """Token ids of a prompt and its answer; the first `prompt` of them are the prompt."""

    ids: torch.Tensor
    prompt: int


def read_conversations(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, split: str, shortest_prompt: int, count: int
) -> list[Conversation]:
    """One conversation for each dialogue of the split: its last answer is what is scored.

    The dialogues before it (in the file, cyclically) become earlier turns until the prompt has
    `shortest_prompt` tokens, as in a session that changes the subject.

    Raises:
        CalibrationError: the file has no dialogue of that split.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines if line.strip()]
    dialogues = [item["messages"] for item in items if item.get("split", split) == split]
    if not dialogues:
        raise CalibrationError(f"{path} has no dialogue of the split {split!r}")
    return [
        _chain(dialogues, last, tokenizer, shortest_prompt)
        for last in range(min(count, len(dialogues)))
    ]


def _chain(
    dialogues: Sequence[list[dict]],
    last: int,
    tokenizer: PreTrainedTokenizerBase,
    shortest_prompt: int,
) -> Conversation:
    messages = list(dialogues[last])
    for back in range(1, len(dialogues)):
        prompt = render(tokenizer, messages[:-1], reply=True)
        if len(prompt) >= shortest_prompt:
            break
        messages = [*dialogues[last - back], *messages]
    prompt = render(tokenizer, messages[:-1], reply=True)
    ids = render(tokenizer, messages)
    if ids[: len(prompt)] != prompt:
        raise CalibrationError("the chat template renders an answer unlike its prompt")
    return Conversation(torch.tensor(ids), len(prompt))
