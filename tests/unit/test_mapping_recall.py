"""Recall documents: what each answer quotes was given before, and they stay within a window and their split."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mapper.capture.recall import (
    GAP,
    QUESTIONS,
    SENTENCES,
    by_gap,
    by_word,
    recall_documents,
)
from mapper.capture.texts import Document
from tests.tiny_pair import WORDS, write_model


def notes_document(tokenizer, count: int) -> Document:
    sentences = (" ".join(WORDS[start : start + 9]) + " ." for start in range(count))
    ids = torch.tensor(tokenizer.encode(" ".join(sentences)))
    return Document("digest", "origin", ids)


def test_answers_repeat_words_from_above(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, 2 * SENTENCES + 1)
    windows = recall_documents([document], tokenizer, length=4096, seed=0)
    assert len(windows) == 2  # the last sentence fills no group
    lengths = set()
    for window in windows:
        assert (window.kind, window.origin) == ("recall", document.origin)
        assert len(window.answers) == QUESTIONS
        text = window.ids.tolist()
        for at in window.answers:
            answer = text[at : text.index(tokenizer.eos_token_id, at)]
            runs = [text[place : place + len(answer)] for place in range(window.answers[0] - 20)]
            assert answer in runs
            lengths.add(len(answer))
    assert lengths == {10, GAP}  # whole sentences and gaps


def test_a_sentence_is_found_by_a_word_that_no_other_has() -> None:
    given = "Tea grows on hills. Coffee grows on mountains."
    question, answer = by_word("Tea grows on hills.", given, random.Random(0))
    assert '"hills"' in question and answer == "Tea grows on hills."
    question, _ = by_word("Tea grows on hills.", given + given, random.Random(0))
    assert '"Tea grows on"' in question


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abc.", min_size=1), min_size=1, max_size=12), st.integers(0, 99))
def test_a_gap_and_its_words_make_the_sentence(words, seed) -> None:
    sentence = " ".join(words)
    question, answer = by_gap(sentence, sentence, random.Random(seed))
    gapped = question.removeprefix('Which words are missing in "').removesuffix('"?')
    assert gapped.replace("____", answer).split() == sentence.split()


def test_windows_are_cut_and_their_answers_with_them(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, SENTENCES)
    (whole,) = recall_documents([document], tokenizer, length=4096, seed=0)
    length = whole.answers[2]
    (cut,) = recall_documents([document], tokenizer, length=length, seed=0)
    assert cut.ids.tolist() == whole.ids[:length].tolist()
    assert cut.answers == whole.answers[:2]


def test_without_a_chat_template_there_are_none(tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path, 2, 0))
    document = notes_document(tokenizer, SENTENCES)
    tokenizer.chat_template = None
    assert recall_documents([document], tokenizer, length=4096, seed=0) == []
