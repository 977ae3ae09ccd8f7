"""Calibration documents: dialogues and text files as windows of token ids, split by document."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    are never split between fitting and held-out. `kind` is "chat" or "prose"; of a chat,
    `answers` are the positions where the assistant's answers begin, and `follow_ups` those of them
    that answer a second or later question of one dialogue.
    """

    digest: str
    origin: str
    ids: torch.Tensor
    kind: str = "prose"
    answers: tuple[int, ...] = ()
    follow_ups: tuple[int, ...] = ()

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

    A line of a .jsonl file is {"messages": [...]} or {"text": ...}; one whose "split" is not
    `split` is left out. Neighbouring dialogues are chained, as in a session that changes its
    subject, until a window is full: caches are mapped where they are long. Texts, and those of
    any other file, are put into a user's message, as an app would send them. Also returns how
    many documents were skipped, by reason.

    Raises:
        CalibrationError: a file is missing or malformed, dialogues are to be read by a tokenizer
            without a chat template, or nothing usable is left.
    """
    documents, skipped = [], Counter()
    seen = set()
    for path in paths:
        for window in _windows(Path(path), tokenizer, length, split, skipped):
            digest = short_digest(str(window.ids))
            if len(window.ids) < _SHORTEST_TOKENS:
                skipped["shorter than 32 tokens"] += 1
            elif digest in seen:
                skipped["duplicate"] += 1
            else:
                seen.add(digest)
                documents.append(
                    Document(
                        digest,
                        window.origin,
                        torch.tensor(window.ids),
                        window.kind,
                        window.answers,
                        window.follow_ups,
                    )
                )
    if not documents:
        raise CalibrationError(
            f"no usable document in {', '.join(map(str, paths))}: {dict(skipped)}"
        )
    random.Random(seed).shuffle(documents)
    return documents, skipped


def first_documents(documents: list[Document], tokens: int) -> list[Document]:
    """Documents from the start of the list until they hold `tokens` tokens."""
    chosen, total = [], 0
    for document in documents:
        if total >= tokens:
            break
        chosen.append(document)
        total += len(document.ids)
    return chosen


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


@dataclass(frozen=True)
class _Window:
    origin: str
    ids: list[int]
    kind: str = "prose"
    answers: tuple[int, ...] = ()
    follow_ups: tuple[int, ...] = ()


def _windows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    split: str,
    skipped: Counter[str],
) -> Iterator[_Window]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: {error}") from error
    if path.suffix != ".jsonl":
        texts = (part for part in _BREAK.split(text) if part.strip())
        yield from _joined_prose(texts, tokenizer, length)
        return
    dialogues, texts = [], []
    # Not `splitlines`: it also splits at U+2028 and the like, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        item = _item(path, number, line)
        if item.get("split", split) != split:
            skipped["of another split"] += 1
        elif "messages" in item:
            dialogues.append(item["messages"])
        else:
            texts.append(item["text"])
    if dialogues and not tokenizer.chat_template:
        raise CalibrationError(
            f"{path}: the tokenizer has no chat template to write dialogues with; give texts, or "
            "add the template to both model folders"
        )
    yield from _chained(dialogues, tokenizer, length, skipped)
    yield from _joined_prose(texts, tokenizer, length)


def _item(path: Path, number: int, line: str) -> dict:
    try:
        item = json.loads(line)
        if "messages" in item:
            parts = [message[key] for message in item["messages"] for key in ("role", "content")]
        else:
            parts = [item["text"]]
        if parts and all(isinstance(part, str) for part in parts):
            return item
        reason = "a role, content or text is no string" if parts else "there is no message"
    except (ValueError, TypeError, KeyError) as error:
        reason = repr(error)
    raise CalibrationError(
        f"{path}:{number}: neither {{'messages': [...]}} nor {{'text': ...}}: {reason}"
    )


def _chained(
    dialogues: list[list[dict]],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    skipped: Counter[str],
) -> Iterator[_Window]:
    """A dialogue with a system message begins a window: templates allow it at the start only."""
    chain: list[dict] = []
    ids: list[int] = []
    # Places in the chain: of each answer, and of those to a second or later question.
    answers: list[int] = []
    follow_ups: list[int] = []
    for messages in [*dialogues, None]:
        full = len(ids) >= length
        if chain and (messages is None or full or messages[0]["role"] == "system"):
            skipped["cut at the window's end"] += len(ids) > length
            begins = {at: len(render(tokenizer, chain[:at], reply=True)) for at in answers}
            inside = (
                tuple(begins[at] for at in which if begins[at] < length)
                for which in (answers, follow_ups)
            )
            yield _Window(short_digest(json.dumps(chain)), ids[:length], "chat", *inside)
            chain, answers, follow_ups = [], [], []
        if messages is not None:
            own = [
                len(chain) + at
                for at, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
            answers += own
            follow_ups += own[1:]
            chain = [*chain, *messages]
            ids = render(tokenizer, chain)


def _joined_prose(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[_Window]:
    """Short texts are joined until a window is full, long ones cut."""
    joined = ""
    for text in [*texts, None]:
        if joined and (text is None or len(tokenizer.encode(joined)) >= length):
            for ids in _prose(joined.strip(), tokenizer, length):
                yield _Window(short_digest(joined), ids)
            joined = ""
        if text is not None:
            joined += text.strip() + "\n\n"


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


def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
