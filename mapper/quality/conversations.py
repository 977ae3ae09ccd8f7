"""Conversations to score on: held-out dialogues chained until the prompt is long enough to matter."""

from __future__ import annotations

import json
import random
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
    """One conversation for each of `count` dialogues of the split: its last answer is what is scored.

    Which ones is drawn with a fixed seed: files often have their dialogues in runs of one kind. The dialogues before
    each (in the file, cyclically) become earlier turns until the prompt has `shortest_prompt` tokens, as in a session
    that changes the subject.

    Raises:
        CalibrationError: the file has no dialogue of that split, or all of them together are shorter than that.
    """
    dialogues = [messages for name, messages in _read(path) if name in (None, split)]
    if not dialogues:
        raise CalibrationError(f"{path} has no dialogue of the split {split!r}")
    order = list(range(len(dialogues)))
    random.Random(0).shuffle(order)
    talks = [_chain(dialogues, last, tokenizer, shortest_prompt) for last in order[:count]]
    shortest = min(talk.prompt for talk in talks)
    if shortest < shortest_prompt:
        raise CalibrationError(
            f"{path}: all {len(dialogues)} dialogues of the split {split!r}, one after the other, make a prompt of "
            f"{shortest} tokens; give more of them, so that it has {shortest_prompt}"
        )
    return talks


def read_other(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, split: str, shortest_prompt: int
) -> torch.Tensor:
    """Token ids of a conversation of another split; of the same one where there is no other."""
    dialogues = [messages for name, messages in _read(path) if name not in (None, split)]
    dialogues = dialogues or [messages for _, messages in _read(path)]
    return _chain(dialogues, len(dialogues) // 2, tokenizer, shortest_prompt).ids


def _read(path: Path) -> list[tuple[str | None, list[dict]]]:
    """Split (if any) and messages of each line.

    Raises:
        CalibrationError: a line is no dialogue; the message has its number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            roles = [message["role"] for message in item["messages"]]
            if roles[-1] != "assistant" or not all(
                isinstance(message["content"], str) for message in item["messages"]
            ):
                raise ValueError("it has to end with an assistant's answer, in text")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise CalibrationError(
                f"{path}:{number}: no dialogue {{'messages': [...]}}: {error!r}"
            ) from None
        found.append((item.get("split"), item["messages"]))
    return found


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
