"""Calibration text: documents, dialogues and where their answers begin, what is held out."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mapper import calibrate
from mapper.capture.texts import read_documents, render
from mapper.errors import CalibrationError
from tests.tiny_pair import say


def test_of_few_texts_one_is_held_out(pair, tmp_path) -> None:
    """Where chance takes some, it is those; where it takes none, the one with the smallest digest."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")

    def split(texts: int, share: float) -> tuple[set[str], set[str]]:
        generator = torch.Generator().manual_seed(2)
        path = tmp_path / "few.txt"
        path.write_text("\n\n\n".join(say(generator, 150) for _ in range(texts)))
        text = calibrate._read_text([path], tokenizer, 4000, 64, share)
        return tuple({one.origin for one in part} for part in (text.fit, text.held_out))

    fit, held = split(8, 0.4)
    limit = 0.4 * 2**32
    assert held == {one for one in fit | held if int(one[:8], 16) < limit}
    assert 1 < len(held) < 8
    fit, held = split(8, 0)
    assert held == {min(fit | held)} and len(fit) == 7
    with pytest.raises(CalibrationError, match=r"^1 text\(s\) cannot be split.*Two blank lines"):
        split(1, 0.4)


def test_a_line_of_json_may_have_any_character_in_its_strings(pair, tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    text = "\u2028w1 \u2029w2 \x85".join([say(torch.Generator(), 20)] * 3)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n\n")
    documents, _ = read_documents([tmp_path / "lines.jsonl"], tokenizer, length=200, seed=0)
    assert len(documents) == 1


@pytest.mark.parametrize(
    "item",
    [
        {"messages": []},
        {"messages": [], "text": "w1"},
        {"messages": [{"content": "w1"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": None, "content": "w1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]},
        {"text": 1},
        {},
    ],
)
def test_a_malformed_line_is_named(pair, tmp_path, item) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"text": "w1"}) + "\n" + json.dumps(item))
    with pytest.raises(CalibrationError, match=f"{path}:2: neither"):
        read_documents([path], tokenizer, length=200, seed=0)


def test_dialogues_need_a_chat_template_and_texts_do_not(pair) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    tokenizer.chat_template = None
    assert read_documents([pair / "prose.txt"], tokenizer, length=200, seed=0)[0]
    with pytest.raises(CalibrationError, match=r"talks\.jsonl: the tokenizer has no chat template"):
        read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)


def test_dialogues_are_chained_and_know_where_answers_begin(pair) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    documents, _ = read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)
    assert sum(len(document.ids) == 200 for document in documents) == len(documents) - 1
    opening = render(tokenizer, [{"role": "user", "content": "w1"}], reply=True)[-2:]
    for document in documents:
        assert document.kind == "chat" and len(document.answers) >= 2
        for at in document.answers:
            assert document.ids[at - 2 : at].tolist() == opening


def test_answers_to_questions_that_follow_up_are_known(pair, tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    turns = [1, 3, 1, 2]
    ask, answer = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    lines = [json.dumps({"messages": [ask, answer] * count}) for count in turns]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    [document], _ = read_documents([tmp_path / "talks.jsonl"], tokenizer, length=2000, seed=0)
    assert len(document.answers) == sum(turns)
    assert [document.answers.index(at) for at in document.follow_ups] == [2, 3, 6]
