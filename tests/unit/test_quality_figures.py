"""Figures with paired intervals, claims, and what fits into the time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mapper.quality import card
from mapper.quality.divergence import Divergence
from mapper.quality.schedule import Part, fit, share, stopwatch
from mapper.quality.statistics import Scores, compare, pooled_retention


def accuracies(chance: float | None = None, **arms: list[float]) -> Scores:
    scores = Scores(chance=chance)
    for values in zip(*arms.values(), strict=True):
        scores.add(1.0, {k: v for k, v in zip(arms, values, strict=True) if v is not None})
    return scores


def figures(scores: Scores, arm: str) -> dict:
    return compare(scores, arm, native="native", source="source", zero="zero")


def test_retention_share_of_the_gap_and_floor() -> None:
    scores = accuracies(
        0.25, native=[1, 1, 1, 0] * 25, source=[1, 0, 0, 0] * 25, mapped=[1, 1, 0, 0] * 25
    )
    found = figures(scores, "mapped")
    assert found["items"] == 100 and found["score"]["value"] == 0.5
    assert found["retention"]["value"] == pytest.approx(2 / 3)
    low, high = found["retention"]["interval"]
    assert 0.5 < low < 2 / 3 < high < 0.85
    assert found["share_of_gap"]["value"] == pytest.approx(0.5)
    assert found["floor_normalised"]["value"] == pytest.approx(0.5)


def test_intervals_are_paired() -> None:
    """An arm that is right exactly where the native one is keeps everything in every draw."""
    native = (np.random.default_rng(3).random(60) < 0.4).astype(float).tolist()
    scores = accuracies(native=native, source=[0.0] * 60, same=native)
    assert figures(scores, "same")["retention"]["interval"] == [1.0, 1.0]


def test_no_gap_and_no_native_score_give_no_figure() -> None:
    scores = accuracies(native=[0, 0, 0], source=[1, 0, 1], mapped=[1, 0, 0])
    found = figures(scores, "mapped")
    assert found["retention"] == {"value": None, "interval": None}
    assert found["share_of_gap"] is None


def test_arms_judged_on_a_part_are_compared_on_that_part() -> None:
    scores = accuracies(
        native=[1, 0, 1, 1], source=[0, 0, 0, 0], zero=[0, 0, None, None], mapped=[1, 0, 0, 0]
    )
    assert figures(scores, "zero")["items"] == 2
    assert figures(scores, "mapped")["retention"]["value"] == pytest.approx(1 / 3)
    # On the two items that the zeroed cache was asked: native 1/2, mapped 1/2, zero 0.
    assert figures(scores, "mapped")["floor_normalised"]["value"] == pytest.approx(1.0)


def test_likelihoods_are_means_a_token_and_ratios_of_probabilities() -> None:
    scores = Scores(log=True)
    scores.add(10, {"native": -10.0, "source": -30.0, "mapped": -12.0})
    scores.add(30, {"native": -30.0, "source": -90.0, "mapped": -32.0})
    found = figures(scores, "mapped")
    assert found["score"]["value"] == pytest.approx(-1.1)
    assert found["retention"]["value"] == pytest.approx(np.exp(-0.1))
    assert found["share_of_gap"]["value"] == pytest.approx(0.95)


def test_tasks_count_alike_in_a_class() -> None:
    one = accuracies(native=[1] * 100, mapped=[1] * 100)
    other = accuracies(native=[1] * 10, mapped=[0] * 10)
    assert pooled_retention([one, other], "mapped", "native")["value"] == pytest.approx(0.5)


def divergence(*sums: tuple[float, int, int]) -> Divergence:
    return Divergence(*(list(part) for part in zip(*sums, strict=True)))


def test_divergence_of_known_distributions() -> None:
    native = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    result = Divergence()
    result.add(native, other)
    summary = result.summary()
    expected = (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert summary["kl"] == pytest.approx(expected, rel=1e-5)
    assert summary["top1"] == 0.5 and summary["tokens"] == 2


def test_divergences_are_compared_on_the_same_conversations() -> None:
    whole = divergence((2.0, 5, 10), (4.0, 5, 10), (9.0, 5, 10))
    part = divergence((8.0, 5, 10), (16.0, 5, 10))
    ratio = part.kl_over(whole)
    assert ratio["value"] == pytest.approx(4.0)
    assert ratio["interval"] == pytest.approx([4.0, 4.0])


def test_claims_say_whether_the_goals_are_met() -> None:
    divergences = {
        name: {64: divergence(*[one] * card.FEWEST_ITEMS)}
        for name, one in (("good", (0.2, 97, 100)), ("bad", (9, 50, 100)))
    }
    by_class = {
        kind: {
            "items": 50,
            "native_points": 20.0,
            "basis": "answers",
            "retention": {
                "good": {"value": 0.99, "interval": [0.9, 1.0]},
                "bad": {"value": value, "interval": None},
            },
        }
        for kind, value in (("choice", 0.97), ("exact", 0.96), ("passage", 0.2), ("cloze", 0.9))
    }
    good = card.claims("good", 64, divergences, by_class)
    bad = card.claims("bad", 64, divergences, by_class)
    assert {kind: one["met"] for kind, one in good.items()} == {
        "chat": True, "choice": True, "exact": True, "passage": True, "cloze": None,
    }  # fmt: skip
    assert {kind for kind, one in bad.items() if one["met"] is False} == {
        "chat",
        "choice",
        "passage",
    }
    for figures in by_class.values():
        figures["items"] = card.FEWEST_ITEMS - 1
    lone = {"good": {64: divergence((0.2, 97, 100))}}
    few = card.claims("good", 64, lone, by_class)
    assert [few[kind]["met"] for kind in ("chat", "choice", "exact", "passage")] == [False] * 4
    assert few["exact"]["retention"] == good["exact"]["retention"]
    # Many questions of which the target itself gets next to none right show as little.
    for figures in by_class.values():
        figures |= {"items": 50, "native_points": card.FEWEST_RIGHT - 1}
    hard = card.claims("good", 64, divergences, by_class)
    assert [hard[kind]["met"] for kind in ("chat", "choice", "exact")] == [True, False, False]
    assert card.policy_retention(bad) == {"chat": pytest.approx(np.exp(-0.09)), "quote": 0.2}


def made_card(tail: int, tasks: dict[str, tuple[str, int, float]]) -> dict:
    """Of tasks by name: class, items and retention."""
    claims = {kind: {"items": items, "retention": kept} for kind, items, kept in tasks.values()}
    return {
        "settings": {"tail": tail, "dtype": "float32"},
        "conversations": claims["chat"]["items"],
        "dialogues": {"of": claims["chat"]["items"]},
        "claims": claims,
        "retention": card.policy_retention(claims),
        "classes": {kind: claims[kind] for kind in claims if kind != "chat"},
        "tasks": {
            name: {"class": kind, "items": items}
            for name, (kind, items, _) in tasks.items()
            if kind != "chat"
        },
    }


def test_cards_of_several_runs_are_one() -> None:
    old = made_card(64, {"talks": ("chat", 40, 0.98), "squad": ("exact", 73, 0.15),
                         "piqa": ("choice", 20, 0.9)})  # fmt: skip
    new = made_card(64, {"talks": ("chat", 1, 0.99), "piqa": ("choice", 40, 1.0),
                         "gsm8k": ("math", 30, 0.8)})  # fmt: skip
    both = card.merged(old, new)
    assert both["retention"] == {"chat": 0.98, "quote": 0.15, "math": 0.8}
    assert {name: one["items"] for name, one in both["tasks"].items()} == {
        "squad": 73, "piqa": 40, "gsm8k": 30,
    }  # fmt: skip
    assert both["conversations"] == 40 == both["dialogues"]["of"]
    assert both["classes"].keys() == {"exact", "choice", "math"}
    for none in (None, {}, {"tasks": {"piqa": 1}}):
        assert card.merged(none, new) == new
    assert card.merged(old | {"settings": {"tail": 32, "dtype": "float32"}}, new) == new


def test_questions_about_one_passage_are_drawn_together() -> None:
    """Ten passages of ten questions each that are answered alike: as uncertain as ten questions, not as a hundred."""
    right = [float(passage % 2) for passage in range(10)]
    apart = accuracies(native=[1.0] * 100, source=[0.0] * 100, mapped=right * 10)
    together = Scores()
    for passage, value in enumerate(right):
        for _ in range(10):
            together.add(1.0, {"native": 1.0, "source": 0.0, "mapped": value}, passage)
    widths = []
    for scores in (apart, together):
        found = figures(scores, "mapped")["score"]
        assert found["value"] == 0.5
        widths.append(found["interval"][1] - found["interval"][0])
    assert widths[1] == pytest.approx(widths[0] * 10**0.5, rel=0.15)


def test_tasks_of_a_class_are_resampled_by_different_draws() -> None:
    """One is right where the other is wrong: drawn alike, their mean would never change."""
    mapped = [1.0, 0.0] * 20
    tasks = [accuracies(native=[1.0] * 40, mapped=one) for one in (mapped, mapped[::-1])]
    found = pooled_retention(tasks, "mapped", "native")
    assert found["value"] == 0.5 and found["interval"][1] - found["interval"][0] > 0.1


def test_ratios_over_the_baseline_and_of_the_raw_cache() -> None:
    divergences = {
        name: {length: divergence((kl, 5, 10)) for length in (1, 64)}
        for name, kl in (("ours", 2.0), ("ridge", 4.0), ("control: raw", 80.0))
    }
    found = card.ratios(divergences, ["ours", "ridge"], "ridge", 64)
    assert found["raw over mapped, no tail"]["ours"]["value"] == 40
    assert found["over ridge, no tail"]["ours"]["value"] == 0.5
    assert "ridge" not in found["over ridge, tail 64"]


def test_all_parts_shrink_alike_to_fit_the_time() -> None:
    parts = [Part("a", 100, 1.0), Part("b", 10, 10.0), Part("c", 2, 0.1)]
    fit(parts, 50.05)
    assert [part.fitting for part in parts] == [25, 2, 1]
    fit(parts, float("inf"))
    assert [part.fitting for part in parts] == [100, 10, 2]


def test_dialogues_come_first() -> None:
    parts = [Part("dialogues", 40, 10.0), Part("a", 100, 1.0), Part("b", 100, 3.0)]
    share(parts, 300)
    assert [part.fitting for part in parts] == [10, 50, 50]
    share(parts[:1], 300)
    assert parts[0].fitting == 30
    share(parts, float("inf"))
    assert [part.fitting for part in parts] == [40, 100, 100]


def test_what_a_part_costs_once_is_set_aside() -> None:
    parts = [Part("a", 10, 1.0, once=20.0), Part("b", 10, 1.0)]
    fit(parts, 30)
    assert [part.fitting for part in parts] == [5, 5]
    assert parts[0].total == 25
    fit(parts, 5)
    assert [part.fitting for part in parts] == [1, 1]


def test_a_part_ends_with_the_run() -> None:
    part = Part("a", 10, 1000.0, fitting=10)
    assert not stopwatch(part, end=0.0)()
    assert stopwatch(part, end=float("inf"))()
    # Ten items were thought to take no time, and the run has no limit.
    late = Part("a", 10, -1e9, fitting=10)
    assert stopwatch(late, end=float("inf"))() and not stopwatch(late, end=1e12)()


def test_arms_are_reported_in_the_order_they_were_judged() -> None:
    scores = accuracies(native=[1], zero=[0], source=[1], mapped=[1], another=[0])
    assert list(scores.sums) == ["native", "zero", "source", "mapped", "another"]
