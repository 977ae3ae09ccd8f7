"""Recall documents: a text, and questions whose answers repeat some of its words, to train maps on quoting."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from mapper.capture.texts import Document, render, short_digest

_SENTENCE = re.compile(r"[^.!?\n]{20,400}[.!?](?=\s|$)")
# Sentences of one document, and how many of them are asked for again.
SENTENCES = 8
QUESTIONS = 6
# Words that are left out of a sentence to be filled in.
GAP = 3


def recall_documents(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, seed: int
) -> list[Document]:
    """Conversations about sentences of `documents`: each answer repeats words that were given far above.

    Next to nothing in a text has to be copied word for word, so that a map that has forgotten the words
    still predicts it well; here nothing else is asked. A sentence is asked for by its opening or by a word in it, or
    for the words of a gap. Windows have at most `length` tokens, and none are made for a tokenizer without a chat
    template. A window is held out with the document that its sentences are from.
    """
    if not tokenizer.chat_template:
        return []
    chooser = random.Random(seed)
    return [
        _window(document, sentences, tokenizer, length, chooser)
        for document in documents
        for sentences in _sentences(tokenizer.decode(document.ids, skip_special_tokens=True))
    ]


def _sentences(text: str) -> Iterator[list[str]]:
    """Groups of `SENTENCES` different ones, in the text's order."""
    found = list(dict.fromkeys(match[0].strip() for match in _SENTENCE.finditer(text)))
    for start in range(0, len(found) - SENTENCES + 1, SENTENCES):
        yield found[start : start + SENTENCES]


def _window(
    document: Document,
    sentences: list[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    chooser: random.Random,
) -> Document:
    given = " ".join(sentences)
    if chooser.random() < 0.5:
        given = "\n".join(f"{number}. {one}" for number, one in enumerate(sentences, start=1))
    messages = [{"role": "user", "content": f"Keep this text for me.\n\n{given}"}]
    messages.append({"role": "assistant", "content": "I have it. Ask me about any of it."})
    answers = []
    for sentence in chooser.sample(sentences, QUESTIONS):
        question, answer = chooser.choice((by_opening, by_word, by_gap))(sentence, given, chooser)
        messages.append({"role": "user", "content": question})
        answers.append(len(render(tokenizer, messages, reply=True)))
        messages.append({"role": "assistant", "content": answer})
    ids = render(tokenizer, messages)[:length]
    return Document(
        short_digest(str(ids)),
        document.origin,
        torch.tensor(ids),
        "recall",
        tuple(at for at in answers if at < length),
    )


def by_opening(sentence: str, given: str, chooser: random.Random) -> tuple[str, str]:
    return f'Quote the sentence that begins with "{" ".join(sentence.split()[:3])}".', sentence


def by_word(sentence: str, given: str, chooser: random.Random) -> tuple[str, str]:
    """By the longest of the words that stand nowhere else, in the text given; without one, by the opening."""
    everywhere = re.findall(r"\w+", given.lower())
    words = [word for word in re.findall(r"\w+", sentence) if everywhere.count(word.lower()) == 1]
    if not words:
        return by_opening(sentence, given, chooser)
    return f'Which sentence has the word "{max(words, key=len)}" in it? Quote it.', sentence


def by_gap(sentence: str, given: str, chooser: random.Random) -> tuple[str, str]:
    words = sentence.split()
    at = chooser.randrange(1, max(2, len(words) - GAP + 1))
    gapped = " ".join([*words[:at], "____", *words[at + GAP :]])
    return f'Which words are missing in "{gapped}"?', " ".join(words[at : at + GAP])
