"""Recall documents: notes, and answers that repeat some of them word for word, to train maps on quoting."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from mapper.capture.texts import Document, render, short_digest

_SENTENCE = re.compile(r"[^.!?\n]{20,400}[.!?](?=\s|$)")
# Notes of one document, and how many of them are asked for again.
NOTES = 8
QUESTIONS = 6


def recall_documents(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, seed: int
) -> list[Document]:
    """Conversations about notes, which are sentences of `documents`: each answer quotes a note given far above.

    Next to nothing in a text has to be copied word for word, so that a map that has forgotten the words
    still predicts it well; here nothing else is asked. Windows have at most `length` tokens, and none are
    made for a tokenizer without a chat template. A window is held out with the document that its notes are from.
    """
    if not tokenizer.chat_template:
        return []
    chooser = random.Random(seed)
    return [
        _window(document, notes, tokenizer, length, chooser)
        for document in documents
        for notes in _notes(tokenizer.decode(document.ids, skip_special_tokens=True))
    ]


def _notes(text: str) -> Iterator[list[str]]:
    """Groups of `NOTES` different sentences, in the text's order."""
    sentences = list(dict.fromkeys(match[0].strip() for match in _SENTENCE.finditer(text)))
    for start in range(0, len(sentences) - NOTES + 1, NOTES):
        yield sentences[start : start + NOTES]


def _window(
    document: Document,
    notes: list[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    chooser: random.Random,
) -> Document:
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    messages = [{"role": "user", "content": f"Keep these notes for me.\n\n{listed}"}]
    messages.append({"role": "assistant", "content": "I have them. Ask me for any of them."})
    answers = []
    for number in chooser.sample(range(len(notes)), QUESTIONS):
        opening = " ".join(notes[number].split()[:3])
        messages.append(
            {"role": "user", "content": f'Quote the note that begins with "{opening}".'}
        )
        answers.append(len(render(tokenizer, messages, reply=True)))
        messages.append({"role": "assistant", "content": notes[number]})
    ids = render(tokenizer, messages)[:length]
    return Document(
        short_digest(str(ids)),
        document.origin,
        torch.tensor(ids),
        "recall",
        tuple(at for at in answers if at < length),
    )
