"""Calibration documents: dialogues and text files as windows of token ids, split by document."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mapper.errors import CalibrationError

# Two or more blank lines end a document of a .txt file.
_BREAK = re.compile(r"\n{3,}")
_SHORTEST_TOKENS = 32


@dataclass(frozen=True)
class Document:
    """One window of tokens that starts at position 0.

    `digest` names its tokens. `origin` names the text it was cut from: windows of one text
    are never split between fitting and held-out.
    """

    digest: str
    origin: str
    ids: torch.Tensor

    def held_out(self, share: float) -> bool:
        return int(self.origin[:8], 16) < share * 2**32


def read_documents(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    seed: int,
    split: str = "train",
) -> tuple[list[Document], Counter[str]]:
    """All windows of at most `length` tokens, in a random order that mixes the files.

    A line of a .jsonl file is {"messages": [...]} and is rendered with the chat template; one
    whose "split" is not `split` is left out. A text of any other file is put into a user's
    message, as an app would send it. Also returns how many documents were skipped, by reason.

    Raises:
        CalibrationError: a file is missing or malformed, or nothing usable is left.
    """
    documents, skipped = [], Counter()
    seen = set()
    for path in paths:
        for origin, ids in _windows(Path(path), tokenizer, length, split, skipped):
            digest = hashlib.sha256(str(ids).encode()).hexdigest()[:16]
            if len(ids) < _SHORTEST_TOKENS:
                skipped["shorter than 32 tokens"] += 1
            elif digest in seen:
                skipped["duplicate"] += 1
            else:
                seen.add(digest)
                documents.append(Document(digest, origin, torch.tensor(ids)))
    if not documents:
        raise CalibrationError(
            f"no usable document in {', '.join(map(str, paths))}: {dict(skipped)}"
        )
    random.Random(seed).shuffle(documents)
    return documents, skipped


def first_tokens(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[int]:
    """Token ids that stand at position 0: of the documents, the chat template and as BOS."""
    tokens = {int(document.ids[0]) for document in documents}
    if tokenizer.bos_token_id is not None:
        tokens.add(tokenizer.bos_token_id)
    if tokenizer.chat_template:
        for role in ("system", "user"):
            tokens.add(render(tokenizer, [{"role": role, "content": "Hello"}])[0])
    return sorted(tokens)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], *, reply: bool = False
) -> list[int]:
    """Token ids of a conversation; with `reply`, up to where the assistant's answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
    return tokenizer.encode(text, add_special_tokens=False)


def _windows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    split: str,
    skipped: Counter[str],
) -> Iterator[tuple[str, list[int]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: {error}") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            item = _dialogue(path, number, line)
            if item.get("split", split) != split:
                skipped["of another split"] += 1
                continue
            ids = render(tokenizer, item["messages"])
            skipped["cut at the window's end"] += len(ids) > length
            yield _origin(line), ids[:length]
        return
    for part in _BREAK.split(text):
        if part.strip():
            for ids in _prose(part.strip(), tokenizer, length):
                yield _origin(part), ids


def _dialogue(path: Path, number: int, line: str) -> dict:
    try:
        item = json.loads(line)
        if all(isinstance(message["content"], str) for message in item["messages"]):
            return item
        reason = "a message's content is no text"
    except (ValueError, TypeError, KeyError) as error:
        reason = repr(error)
    raise CalibrationError(f"{path}:{number}: no dialogue {{'messages': [...]}}: {reason}")


def _prose(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not tokenizer.chat_template:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        step = length - len(bos)
        for start in range(0, len(ids), step):
            yield bos + ids[start : start + step]
        return
    mark = "\u241e"
    wrapped = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, after = (
        tokenizer.encode(side, add_special_tokens=False) for side in wrapped.split(mark)
    )
    step = length - len(before) - len(after)
    if step < _SHORTEST_TOKENS:
        raise CalibrationError(f"windows of {length} tokens leave no room beside the chat template")
    for start in range(0, len(ids), step):
        yield before + ids[start : start + step] + after


def _origin(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
