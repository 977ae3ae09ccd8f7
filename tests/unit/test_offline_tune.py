"""Tuning: curves against hand-made cases, fits that recover what is there, thresholds that hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import policies
from policies import Economics, SessionView
from policies.features import features
from router.cli import app
from router.offline import curves, edit, fit, guarantee
from router.offline.curves import Outcomes
from router.offline.records import Item, RecordError, read_items
from router.offline.tune import Goal, as_outcomes, split, tune
from tests.graded_turns import items


def outcomes(small, large, session=None, task=None):
    n = len(small)
    return Outcomes(
        np.array(small, float),
        np.array(large, float),
        np.arange(n) if session is None else np.array(session),
        np.array(["a"] * n if task is None else task),
    )


FOUR = outcomes([0, 0, 1, 1], [1, 1, 1, 0])


def test_a_curve_by_hand():
    line = curves.curve(np.array([4.0, 3.0, 2.0, 1.0]), FOUR, small_cost=0.2)
    assert line.quality.tolist() == [0.5, 0.75, 1.0, 1.0, 0.75]
    assert line.cost.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    cascade = curves.curve(np.array([4.0, 3.0, 2.0, 1.0]), FOUR, small_cost=0.2, cascade=True)
    assert cascade.cost.tolist() == pytest.approx([0.2, 0.45, 0.7, 0.95, 1.2])
    assert line.area == pytest.approx((0.625 + 0.875 + 1.0 + 0.875) / 4)
    assert curves.oracle(FOUR).area == line.area


def test_equal_scores_say_nothing():
    flat = curves.curve(np.zeros(4), FOUR)
    assert flat.quality.tolist() == pytest.approx([0.5, 0.5625, 0.625, 0.6875, 0.75])
    assert flat.quality.tolist() == pytest.approx(curves.shuffled(FOUR).quality.tolist())
    assert curves.summary(flat, FOUR)["gap_recovered"] == pytest.approx(0.5)


def test_levels_are_costs():
    found = curves.summary(curves.oracle(FOUR, small_cost=0.2), FOUR)
    # Of large's 0.75: 0.375 is there with small alone, 0.6 and 0.7125 with one turn of four.
    assert list(found["of_large_quality"].values()) == pytest.approx([0.2, 0.4, 0.4])
    assert list(found["of_gap"].values()) == pytest.approx([0.4, 0.4, 0.4])


def test_chosen_spreads_ties():
    picked = curves.chosen(np.array([1.0, 1.0, 1.0, 5.0]), 0.5)
    assert picked.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_the_interval_is_paired_and_by_session():
    rng = np.random.default_rng(0)
    gap = (rng.random(400) < 0.5).astype(float)
    some = outcomes(np.zeros(400), gap)
    perfect = curves.against_shuffled(gap, some, 0.3)
    assert perfect["low"] > 0 and perfect["difference"] == pytest.approx(0.3 - 0.3 * gap.mean())
    noise = curves.against_shuffled(rng.random(400), some, 0.3)
    assert noise["low"] < 0 < noise["high"]
    # The same turns in twenty sessions of twenty equal ones: less is known.
    apart = outcomes(np.zeros(400), np.repeat(gap[:20], 20))
    together = outcomes(np.zeros(400), np.repeat(gap[:20], 20), np.repeat(np.arange(20), 20))
    score = np.arange(400.0)
    widths = [
        (one := curves.against_shuffled(score, part, 0.3))["high"] - one["low"]
        for part in (apart, together)
    ]
    assert widths[1] > 2 * widths[0]


def test_within_tasks_knowing_the_task_is_worth_nothing():
    task = np.array(["easy", "hard"] * 100)
    gap = (task == "hard").astype(float)
    part = outcomes(np.zeros(200), gap, task=task)
    score = gap.copy()
    assert curves.against_shuffled(score, part, 0.5)["low"] > 0
    within = curves.against_shuffled(score, part, 0.5, within_task=True)
    assert within["difference"] == pytest.approx(0)


def test_a_fit_finds_what_the_words_tell():
    made = [Item.model_validate(row) for row in items()]
    gap = np.array([item.gap for item in made])
    sessions = np.arange(len(made)) // 3
    model, unseen, training = fit.fit([features(item.as_turn()) for item in made], gap, sessions)
    assert training["calibration"] == "platt"
    hard = model.gain(features(made[0].model_copy(update={"text": "alpha beta gamma"}).as_turn()))
    easy = model.gain(features(made[0].model_copy(update={"text": "eta iota kappa"}).as_turn()))
    assert hard > 0.2 > easy + 0.1
    again, *_ = fit.fit([features(item.as_turn()) for item in made], gap, sessions)
    assert again == model
    # What models say of turns that they have not seen tells something, but less.
    seen = np.array([model.gain(features(item.as_turn())) for item in made])
    assert np.corrcoef(seen, gap)[0, 1] > np.corrcoef(unseen, gap)[0, 1] > 0.15


def test_noise_is_fitted_to_nearly_nothing():
    rng = np.random.default_rng(0)
    rows = [{f"h{i}": 1.0 for i in rng.integers(0, 300, 12)} for _ in range(300)]
    gap = rng.integers(-1, 2, 300).astype(float)
    model, *_ = fit.fit(rows, gap, np.arange(300))
    assert max(abs(model.gain(row)) for row in rows) < 0.35


def test_features_that_never_vary_do_not_speak():
    rows = [{"turn": 0.7, "x": float(i % 2)} for i in range(60)]
    model, *_ = fit.fit(rows, np.array([1.0, -1.0] * 30), np.arange(60))
    assert "turn" not in model.weights and "x" in model.weights
    constant, *_ = fit.fit([{"turn": 0.7}] * 60, np.array([1.0, 0.0] * 30), np.arange(60))
    assert constant.gain({"turn": 9.0}) == pytest.approx(0.5)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


POLICY = """# kept as it is
kind: adaptive
threshold: 0.9   # set by tune
classifier: {model: x.json}
cascade:
  score: y.json
  threshold: 0.9
"""


def test_tune_from_file_to_policy(tmp_path):
    source = write(tmp_path / "turns.jsonl", [*items(600), {"event": "request"}])
    policy = tmp_path / "p.yaml"
    policy.write_text(POLICY)
    found = tune(source, tmp_path / "out", policy, Goal(large_share=0.3), 0.2)
    assert found["turns"]["skipped"] == 1
    scores = found["scores"]
    for name in ("classifier", "cascade"):
        assert scores[name]["against_shuffled"]["30%"]["low"] > 0
        assert 0.15 < scores[name]["at_threshold"]["large_share"] < 0.5
        assert scores[name]["gap_recovered"] > scores["prompt length"]["gap_recovered"]
        assert found["oracle"]["area"] >= scores[name]["area"] > found["shuffled"]["area"]
    assert scores["prompt length"]["against_shuffled"]["30%"]["low"] < 0.02
    text = (tmp_path / "out/policy.yaml").read_text()
    assert text.startswith("# kept as it is") and "# set by tune" in text
    tuned = policies.from_file(tmp_path / "out/policy.yaml")
    assert tuned.threshold == found["written"]["threshold"] != 0.9
    # The policy in pure Python decides as the fit did.
    test = split(read_items(source)[0], 0)[2]
    large = [
        tuned.decide(item.as_turn(), SessionView(), Economics()).tier == "large" for item in test
    ]
    assert np.mean(large) == pytest.approx(scores["classifier"]["at_threshold"]["large_share"])
    assert (tmp_path / "out/curves.png").stat().st_size > 10_000
    report = (tmp_path / "out/report.md").read_text()
    assert all(f"| {name} |" in report for name in [*scores, "oracle", "shuffled"])


def test_a_classifier_that_reads_log_probabilities_does_without_them_too(tmp_path):
    source = write(tmp_path / "turns.jsonl", items(300))
    (tmp_path / "p.yaml").write_text(POLICY)
    tune(source, tmp_path / "out", tmp_path / "p.yaml", Goal(large_share=0.3), 0.2, True)
    policy = policies.from_file(tmp_path / "out/policy.yaml")
    assert policy.needs_prompt_logprob and "prompt_logprob" in policy.classifier.model.fill
    turn = read_items(source)[0][0].as_turn().model_copy(update={"prompt_logprob": None})
    fill = policy.classifier.model.fill["prompt_logprob"]
    with_mean = turn.model_copy(update={"prompt_logprob": fill})
    assert policy.classifier.gain(turn) == pytest.approx(policy.classifier.gain(with_mean))


def routed(goal):
    """Turns by doubt: their quality and loss when the threshold is set for the goal."""
    made = [Item.model_validate(row) for row in items(600)]
    score = np.array([-item.signals["mean_logprob"] for item in made])
    value = goal.threshold(score, made)
    some = as_outcomes(made)
    loss = guarantee.session_loss(score, some.gap, some.session, value).mean()
    picked = score > value
    return picked.mean(), np.where(picked, some.large, some.small).mean(), loss, some.large.mean()


def test_goals_are_met_where_the_threshold_is_set():
    share, _, _, _ = routed(Goal(large_share=0.25))
    assert share == pytest.approx(0.25, abs=0.01)
    share, quality, _, large = routed(Goal(quality=0.9))
    assert quality >= 0.9 * large and 0 < share < 0.6
    share, _, loss, _ = routed(Goal(loss=0.1))
    assert 0.08 < loss <= 0.1 and 0 < share < 0.6
    assert routed(Goal(large_share=1.0))[0] == 1 and routed(Goal(large_share=0.0))[0] == 0


def test_conformal_risk_control_holds_over_many_draws():
    """The mean loss of new sessions over 300 calibrations is at most the limit, but for chance."""
    rng = np.random.default_rng(0)

    def draw(sessions):
        session = np.repeat(np.arange(sessions), 4)
        score = rng.random(len(session))
        gap = (rng.random(len(session)) < 0.6 * score).astype(float)
        return score, gap, session

    losses = []
    for _ in range(300):
        value = guarantee.threshold(*draw(40), limit=0.1)
        losses.append(guarantee.session_loss(*draw(40), value).mean())
    assert 0.06 < np.mean(losses) <= 0.1 + 3 * np.std(losses) / np.sqrt(300)


def test_too_few_sessions_guarantee_nothing():
    score, gap, session = np.array([0.9, 0.1]), np.array([1.0, 0.0]), np.array([0, 1])
    assert guarantee.threshold(score, gap, session, limit=0.3) is None
    value = guarantee.threshold(score, gap, session, limit=0.34)
    assert guarantee.session_loss(score, gap, session, value).sum() == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(0, 8)),
        min_size=1, max_size=40,
    ),
    st.floats(0.01, 1),
)  # fmt: skip
def test_the_threshold_is_the_highest_that_will_do(rows, limit):
    score, gap, session = (np.array(column) for column in zip(*rows, strict=True))
    k = len(np.unique(session))

    def bound(value):
        return (guarantee.session_loss(score, gap, session, value).sum() + 1) / (k + 1)

    value = guarantee.threshold(score, gap, session, limit)
    if value is None:
        assert bound(score.min() - 1) > limit
    else:
        assert bound(value) <= limit
        assert all(bound(higher) > limit for higher in score[score > value])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": "a"}], "no line has both"),
        ([{"small": {"quality": 2}, "large": {"quality": 1}}], ":1: small.quality"),
        ([{"small": {}, "large": {"quality": 1}}], ":1: small.quality"),
        (items(8), "too few"),
    ],
)
def test_bad_input_says_where(tmp_path, rows, words):
    source = write(tmp_path / "turns.jsonl", rows)
    (tmp_path / "p.yaml").write_text(POLICY)
    with pytest.raises(RecordError, match=words):
        tune(source, tmp_path / "out", tmp_path / "p.yaml", Goal(large_share=0.3), 0.2)


def test_yaml_keeps_its_comments():
    text = edit.put(POLICY, "cascade.threshold", 0.25)
    assert text == POLICY.replace("  threshold: 0.9", "  threshold: 0.25")
    assert yaml.safe_load(edit.put(text, "classifier.model", "b c.json"))["classifier"] == {
        "model": "b c.json"
    }
    assert not edit.has(POLICY, "cascade.mode") and not edit.has(POLICY, "cascade")
    with pytest.raises(ValueError, match=r"cascade\.mode"):
        edit.put(POLICY, "cascade.mode", "early")


def test_the_command(tmp_path):
    source = write(tmp_path / "turns.jsonl", items(300))
    runner = CliRunner()
    result = runner.invoke(
        app, ["tune", str(source), str(tmp_path / "out"), "--large-share", "0.2"]
    )
    assert result.exit_code == 0, result.output
    assert "| cascade |" in result.output and "policy.yaml" in result.output
    both = ["tune", str(source), str(tmp_path / "out"), "--large-share", "0.2", "--quality", "0.9"]
    assert runner.invoke(app, both).exit_code == 2


def test_policy_check(tmp_path):
    runner = CliRunner()
    good = runner.invoke(app, ["policy", "check", "balanced"])
    assert good.exit_code == 0 and "0 wrong" in good.output
    bad = tmp_path / "p.yaml"
    bad.write_text("kind: pinned\nprobes: [{text: hi, tier: large}]\n")
    result = runner.invoke(app, ["policy", "check", str(bad)])
    assert result.exit_code == 1 and "expected large" in " ".join(result.output.split())
    bad.write_text("kind: pinned\ntier: huge\n")
    result = runner.invoke(app, ["policy", "check", str(bad)])
    assert result.exit_code == 2 and f"{bad}:2: tier" in result.output
    schema = json.loads(runner.invoke(app, ["policy", "schema"]).output)
    assert "adaptive" in schema["discriminator"]["mapping"]
