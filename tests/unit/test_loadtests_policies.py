"""The benchmarks of policies: sessions as described, every policy on the same turns."""

from __future__ import annotations

from itertools import pairwise

import policies
from loadtests import decisions, switching
from loadtests.sessions import TURNS, mixed_sessions
from router.offline.cli import preset
from router.offline.costmodel import DEMO, read_costs
from router.offline.records import Item
from tests.graded_turns import items

ITEMS = [Item.model_validate(row) for row in items(600)]


def test_sessions_are_mixed_and_repeatable():
    sessions = mixed_sessions(ITEMS, 5, seed=3)
    assert sessions == mixed_sessions(ITEMS, 5, seed=3) != mixed_sessions(ITEMS, 5, seed=4)
    by_text = {item.text: item for item in ITEMS}
    for name, turns in sessions.items():
        assert [turn.turn for turn in turns] == list(range(1, TURNS + 1))
        assert {turn.session for turn in turns} == {name}
        for before, turn in pairwise(turns):
            assert turn.prompt_tokens > before.prompt_tokens + before.completion_tokens
        for turn in turns:
            item = by_text[turn.text]
            assert turn.quality == {"small": item.small.quality, "large": item.large.quality}
            assert turn.signals == item.signals
        tasks = [by_text[turn.text].task for turn in turns]
        runs = 1 + sum(a != b for a, b in pairwise(tasks))
        assert 2 <= runs <= 14


def test_all_policies_answer_the_same_turns(monkeypatch):
    monkeypatch.setattr(switching, "THRESHOLDS", (0.0, 0.2))
    monkeypatch.setattr(switching, "VALUES", (0.005, 0.05))
    costs = read_costs(DEMO)
    found = switching.compare(ITEMS, costs, sessions=3, seed=0)
    assert found["turns"] == 3 * TURNS
    figures = found["policies"]
    assert set(figures) == {
        switching.WITH_TERM, switching.NO_TERM, switching.SMALL_FIRST, switching.LARGE,
        "always small",
    }  # fmt: skip
    assert figures["always small"]["total"] < figures[switching.LARGE]["total"]
    assert figures[switching.SMALL_FIRST]["mapped_tokens"] == 0
    for name, one in figures.items():
        total = one["money"] + costs.second_price * one["seconds"]
        assert abs(one["total"] - total) < 1e-12
        assert name in switching.markdown(found)


def test_decision_times_are_reported_by_length():
    found = decisions.measure(policies.from_file(preset("balanced")), 20)
    assert set(found) == set(decisions.LENGTHS)
    assert all(0 < one["median"] <= one["p99"] for one in found.values())
