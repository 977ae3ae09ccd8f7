"""The benchmarks of policies: sessions as described, every policy on the same turns."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from loadtests import decisions, equal_quality, sessions, switching, ways
from loadtests.equal_quality import Tried, compare_at, cost_at, levels
from loadtests.sessions import SETTINGS, TURNS, mixed_sessions
from policies.logistic import Calibrated
from router.offline.cli import preset
from router.offline.costmodel import DEMO, read_costs
from router.offline.records import Item
from router.offline.sessions import read_sessions
from router.offline.tune import Score
from tests.graded_turns import items

ITEMS = [Item.model_validate(row) for row in items(600)]


def runs(values):
    return 1 + sum(a != b for a, b in pairwise(values))


def test_sessions_are_mixed_and_repeatable():
    made = mixed_sessions(ITEMS, 5, seed=3)
    assert made == mixed_sessions(ITEMS, 5, seed=3) != mixed_sessions(ITEMS, 5, seed=4)
    by_text = {item.text: item for item in ITEMS}
    for name, turns in made.items():
        assert [turn.turn for turn in turns] == list(range(1, TURNS + 1))
        assert {turn.session for turn in turns} == {name}
        assert len({turn.text for turn in turns}) == TURNS
        for before, turn in pairwise(turns):
            assert turn.prompt_tokens > before.prompt_tokens + before.completion_tokens
        for turn in turns:
            item = by_text[turn.text]
            assert turn.quality == {"small": item.small.quality, "large": item.large.quality}
            assert turn.signals == item.signals
        assert 2 <= runs([by_text[turn.text].task for turn in turns]) <= 14


def test_sessions_are_what_a_replay_reads(tmp_path, monkeypatch):
    outcomes, out = tmp_path / "outcomes.jsonl", tmp_path / "sessions.jsonl"
    outcomes.write_text("\n".join(map(json.dumps, items(200))))
    arguments = ["sessions", str(outcomes), str(out), "--sessions", "2", "--seed", "3"]
    monkeypatch.setattr("sys.argv", arguments)
    sessions.main()
    made = mixed_sessions([Item.model_validate(row) for row in items(200)], 2, seed=3)
    assert read_sessions(out) == (made, 0)


def test_settings_are_what_they_say():
    """Hard turns come in runs, and as many as without; documents make contexts long."""
    made = {name: mixed_sessions(ITEMS, 30, 5, one).values() for name, one in SETTINGS.items()}
    hard = {
        name: [[turn.quality["small"] < 0.5 for turn in turns] for turns in of]
        for name, of in made.items()
    }
    changes = {name: np.mean([runs(one) for one in of]) for name, of in hard.items()}
    assert changes["mixed"] < 0.8 * changes["hardness without runs"]
    shares = {name: np.mean(of) for name, of in hard.items()}
    assert shares["mixed"] == pytest.approx(shares["hardness without runs"], abs=0.05)
    prompts = {name: [turns[-1].prompt_tokens for turns in of] for name, of in made.items()}
    assert np.mean(prompts["mixed"]) > 1.2 * np.mean(prompts["short contexts"])
    assert np.std(prompts["mixed"]) > 3 * np.std(prompts["short contexts"])


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "VALUES", (0.005, 0.05))
        patch.setattr(ways, "QUANTILES", (0.5, 0.9))
        patch.setattr(equal_quality, "_ROUNDS", 20)
        yield switching.run(ITEMS, read_costs(DEMO), SETTINGS["mixed"], sessions=3, splits=1)


def test_all_ways_answer_the_same_turns(found):
    assert found["turns"] == 3 * TURNS
    figures = found["ways"]
    assert set(figures) == {*ways.WAYS, *ways.PINNED}
    assert figures[ways.SMALL]["total"] < figures[ways.LARGE]["total"]
    assert figures[ways.NO_MAP]["mapped"] == figures[ways.SMALL_FIRST]["mapped"] == 0
    assert figures[ways.NO_TERM]["mapped"] > 0
    second = 1e6 * read_costs(DEMO).second_price
    ours = figures[ways.WITH_TERM]
    for name, one in figures.items():
        assert one["total"] == pytest.approx(one["money"] + second * one["seconds"])
        more = one["more_total"]
        assert more["difference"] == pytest.approx(one["total"] - ours["total"])
        assert more["low"] <= more["difference"] <= more["high"]
        assert name in switching.markdown({"mixed": found})
    assert all(len(knobs) == 1 for knobs in found["knobs"].values())
    for level in found["equal_quality"]:
        for pair in level["others"].values():
            assert pair["difference"] == pytest.approx(pair["other"] - pair["ours"])


def test_ways_differ_in_what_they_say_only():
    model = Calibrated(weights={"margin": -1.0})
    scores = {"cascade": Score("cascade", np.zeros(0), np.zeros(0), model)}
    made = {name: ways.policy(name, 0.1, scores, read_costs(DEMO), 0.8) for name in ways.WAYS}
    ours, gain = made[ways.WITH_TERM], made[ways.NO_TERM]
    assert ours.switching.value == 0.1 and gain.threshold == gain.cascade.threshold == 0.1
    assert ours.kv == gain.kv and ours.stability == gain.stability
    assert gain.model_copy(update={"kv": made[ways.NO_MAP].kv}) == made[ways.NO_MAP]
    assert made[ways.SMALL_FIRST].threshold == 1


def test_cost_at_a_quality_is_on_the_lower_hull():
    quality, cost = np.array([0.2, 0.4, 0.5, 0.6, 0.3]), np.array([1.0, 5.0, 3.0, 9.0, 9.0])
    assert cost_at(quality, cost, 0.5) == 3.0
    assert cost_at(quality, cost, 0.35) == pytest.approx(2.0)
    assert cost_at(quality, cost, 0.55) == pytest.approx(6.0)
    assert cost_at(quality, cost, 0.9) == 9.0
    # More quality for less money.
    assert cost_at(np.array([0.2, 0.5]), np.array([4.0, 3.0]), 0.2) == 3.0


POINTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=12)


@given(POINTS, st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
def test_more_quality_never_costs_less(points, wanted):
    quality, cost = np.array(points).T
    less, more = (cost_at(quality, cost, q) for q in wanted)
    assert less <= more + 1e-9
    assert cost.min() - 1e-9 <= less and more <= cost.max() + 1e-9


def test_a_dearer_way_is_found_dearer():
    rng = np.random.default_rng(0)
    level = rng.normal(0, 1, 60)
    tried = {
        "small": Tried([(1 + level * 0.1).tolist()], [(0.4 + level * 0.02).tolist()]),
        "large": Tried([(9 + level * 0.1).tolist()], [(0.8 + level * 0.02).tolist()]),
        "ours": Tried([(3 + level * 0.1).tolist()], [(0.7 + level * 0.02).tolist()]),
        "other": Tried([(4 + level * 0.1).tolist()], [(0.7 + level * 0.02).tolist()]),
    }
    one = compare_at(tried, "ours", "other", levels("small", "large", 0.75))
    assert one["difference"] == pytest.approx(1.0, abs=0.01) and one["low"] > 0.9
    same = compare_at(tried, "ours", "ours", levels("small", "large", 0.5))
    assert same["difference"] == same["low"] == same["high"] == 0


def test_decision_times_are_reported_by_length():
    found = decisions.measure(policies.from_file(preset("balanced")), 20)
    assert set(found) == set(decisions.LENGTHS)
    assert all(0 < one["median"] <= one["p99"] for one in found.values())
