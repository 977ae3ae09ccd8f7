"""Task prompts, the comparison of spans, and intervals over conversations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mapper.quality.divergence import Divergence
from mapper.quality.evaluate import _retention, choose_tail
from mapper.quality.tasks import SHORTEST_PROMPT, build_prompt, normalise, read_tasks


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def folder(tmp_path):
    rows = [
        {
            "question": f"what is number {i} " + "x " * 20,
            "choices": ["one", "two", "three"],
            "label": i % 3,
        }
        for i in range(90)
    ]
    (tmp_path / "arc_easy.jsonl").write_text("\n".join(map(json.dumps, rows)))
    row = {
        "context": "The capital is Paris.",
        "question": "Which?",
        "answers": ["Paris"],
        "title": "t",
    }
    (tmp_path / "squad.jsonl").write_text("\n".join([json.dumps(row)] * 80))
    return tmp_path


def test_prompts_are_long_and_show_no_question_as_its_own_example(folder) -> None:
    task = next(iter(read_tasks(folder, items=20)))
    assert task.name == "arc_easy" and len(task.questions) == 20
    for question in task.questions:
        prompt = build_prompt(task, question, words)
        assert words(prompt) >= SHORTEST_PROMPT
        assert prompt.endswith(question.text) and prompt.count(question.text) == 1
        assert question.solution == question.options[question.label]


def test_only_tasks_that_are_there(folder) -> None:
    assert [task.name for task in read_tasks(folder, items=5)] == ["arc_easy", "squad"]


@pytest.mark.parametrize(
    ("spoken", "answer", "same"),
    [
        (" The Paris.", "paris", True),
        ("3.5 km", "3.5 km", True),
        ("35 km", "3.5 km", False),
        ("", "paris", False),
    ],
)
def test_spans_are_compared_as_squad_does(spoken: str, answer: str, same: bool) -> None:
    assert (normalise(spoken) == normalise(answer)) is same


def test_divergence_of_known_distributions() -> None:
    native = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    result = Divergence()
    result.add(native, other)
    summary = result.summary()
    expected = (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert summary["kl"] == pytest.approx(expected, rel=1e-5)
    assert summary["top1"] == 0.5 and summary["tokens"] == 2


def test_retention_and_share_of_the_gap() -> None:
    native, source = np.array([1.0, 1, 1, 0] * 25), np.array([1.0, 0, 0, 0] * 25)
    measured = _retention(np.array([1.0, 1, 0, 0] * 25), native, source)
    assert measured["retention"] == pytest.approx(2 / 3)
    assert measured["share_of_gap"] == pytest.approx(0.5)
    low, high = measured["retention_interval"]
    assert 0.5 < low < 2 / 3 < high < 0.85


def test_the_shortest_tail_that_is_good_enough_is_chosen() -> None:
    curve = {
        f"tail {tail}": {"kl": kl}
        for tail, kl in zip((1, 16, 32, 64, 128), (0.1, 0.05, 0.029, 0.02, 0.01), strict=True)
    }
    assert choose_tail(curve) == 32
    assert choose_tail({key: {"kl": 1.0} for key in curve}) == 128
