"""Recall documents: what each answer quotes was given before, and they stay within a window and their split."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from mapper.capture.recall import NOTES, QUESTIONS, recall_documents
from mapper.capture.texts import Document
from tests.tiny_pair import WORDS, write_model


def notes_document(tokenizer, count: int) -> Document:
    sentences = (" ".join(WORDS[start : start + 9]) + " ." for start in range(count))
    ids = torch.tensor(tokenizer.encode(" ".join(sentences)))
    return Document("digest", "origin", ids)


def test_answers_quote_a_note_from_above(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, 2 * NOTES + 1)
    windows = recall_documents([document], tokenizer, length=4096, seed=0)
    assert len(windows) == 2  # the last sentence fills no group
    for window in windows:
        assert (window.kind, window.origin) == ("recall", document.origin)
        assert len(window.answers) == QUESTIONS
        text = window.ids.tolist()
        quoted = set()
        for at in window.answers:
            quote = tuple(text[at : at + 10])
            assert tokenizer.decode(quote[-1:]) == "."
            earlier = [tuple(text[place : place + 10]) for place in range(window.answers[0] - 20)]
            assert quote in earlier
            quoted.add(quote)
        assert len(quoted) == QUESTIONS


def test_windows_are_cut_and_their_answers_with_them(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, NOTES)
    (whole,) = recall_documents([document], tokenizer, length=4096, seed=0)
    length = whole.answers[2]
    (cut,) = recall_documents([document], tokenizer, length=length, seed=0)
    assert cut.ids.tolist() == whole.ids[:length].tolist()
    assert cut.answers == whole.answers[:2]


def test_without_a_chat_template_there_are_none(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, NOTES)
    tokenizer.chat_template = None
    assert recall_documents([document], tokenizer, length=4096, seed=0) == []
