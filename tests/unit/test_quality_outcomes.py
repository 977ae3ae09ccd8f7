"""Outcomes of both models: options answered in one pass are as answered one by one."""

from __future__ import annotations

import json

import pytest
import torch

from mapper.errors import BadTask, MapperError
from mapper.quality import outcomes
from mapper.quality.outcomes import Answerer
from router.offline.records import read_items
from tests.tiny_pair import write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / name, layers, seed) for name, layers, seed in
            (("small", 2, 0), ("large", 3, 1))]  # fmt: skip


TASKS = {
    "arc_easy": {"question": "w1 w2 w3", "choices": ["w4 w5", "w6", "w7 w8 w9"], "label": 0},
    "winogrande": {"sentence": "w1 w2 _ w3 w4 w5", "option1": "w6", "option2": "w7", "label": 1},
    "lambada": {"text": "w1 w2 w3 w4", "target": "w4"},
}


@pytest.fixture
def data(tmp_path):
    for name, row in TASKS.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    return tmp_path


def plain(answerer: Answerer, prompt: str, option: str) -> list[float]:
    ids = answerer._encode(prompt), answerer._encode(option)
    whole = torch.tensor([ids[0] + ids[1]])
    with torch.inference_mode():
        logprobs = answerer.model(input_ids=whole).logits[0].float().log_softmax(-1)
    return [float(logprobs[len(ids[0]) - 1 + i, token]) for i, token in enumerate(ids[1])]


def test_options_are_scored_as_one_by_one(folders, data):
    answerer = Answerer(folders[0])
    task = next(iter(outcomes.read_tasks(data, items=1, only=["arc_easy"])))
    question = task.questions[0]
    answer = answerer.answer(question, task)
    alone = [plain(answerer, question.prompt, option) for option in question.options]
    values = [sum(one) / len(text) for one, text in zip(alone, question.options, strict=True)]
    best = max(range(3), key=values.__getitem__)
    assert answer.quality == float(best == question.label)
    assert answer.logprobs == pytest.approx(alone[best], abs=1e-4)
    per_token = len(question.options[best]) / len(alone[best])
    margin = (values[best] - sorted(values)[-2]) * per_token
    assert answer.margin == pytest.approx(margin, abs=1e-4)


def test_with_a_suffix_it_alone_is_compared(folders, data):
    answerer = Answerer(folders[0])
    task = next(iter(outcomes.read_tasks(data, items=1, only=["winogrande"])))
    question = task.questions[0]
    answer = answerer.answer(question, task)
    alone = [
        sum(plain(answerer, question.prompt + option, question.suffix))
        for option in question.options
    ]
    tokens = len(answerer._encode(question.suffix))
    assert answer.margin == pytest.approx(abs(alone[0] - alone[1]) / tokens, abs=1e-3)
    assert answer.quality == float(alone[1] > alone[0])


def test_what_is_written_is_what_tune_reads_and_a_run_goes_on(folders, data):
    out = data / "outcomes.jsonl"
    assert outcomes.run(*folders, data, out, items=2) == 6
    first = out.read_text()
    out.write_text("".join(first.splitlines(keepends=True)[:4]))
    assert outcomes.run(*folders, data, out, items=2) == 6
    assert out.read_text() == first
    items, skipped = read_items(out)
    assert (len(items), skipped) == (6, 0)
    assert {item.task for item in items} == set(TASKS)
    for item in items:
        assert item.small.quality in (0.0, 1.0) and item.signals["low_logprob"] <= 0
        assert item.signals["low_logprob"] <= item.signals["mean_logprob"] + 1e-4


def test_tasks_that_are_not_right_or_wrong_are_refused(folders, data, tmp_path):
    (data / "squad.jsonl").write_text('{"context": "c", "question": "q", "answers": ["a"]}\n')
    with pytest.raises(BadTask, match="arc_easy, arc_challenge"):
        outcomes.run(*folders, data, tmp_path / "out.jsonl", items=2, only=["squad"])


def test_no_task_files_is_an_error(folders, tmp_path):
    with pytest.raises(MapperError):
        outcomes.run(*folders, tmp_path, tmp_path / "out.jsonl", items=2)
