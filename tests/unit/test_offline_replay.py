"""Replay: every figure of a small session worked out by hand; deterministic; reads logs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import policies
from router.cli import app
from router.offline.costmodel import DEMO, CostModel, read_costs
from router.offline.records import RecordError
from router.offline.sessions import ReplayTurn, read_sessions
from router.offline.simulate import simulate

TIER = {"prompt_price": 1.0, "cached_price": 0.1, "completion_price": 2.0}
COSTS = CostModel.model_validate(
    {
        "second_price": 0.001,
        "small": {
            **{key: value / 10 for key, value in TIER.items()},
            "prefill_token_seconds": 0.001,
            "decode_token_seconds": 0.05,
        },
        "large": {
            **TIER,
            "prefill_token_seconds": 0.002,
            "attention_seconds": 1.0,
            "decode_token_seconds": 0.1,
        },
        "map_to": {
            "large": {
                "transfer_seconds": 0.1,
                "token_seconds": 0.0005,
                "native_tail": 50,
                "least_tokens": 100,
                "retention": {"chat": 0.9},
                "drift_per_turn": 0.06,
            }
        },
        "cache_seconds": 600,
    }
)


def turn(number, prompt, **fields):
    return ReplayTurn(
        **{"session": "s", "turn": number, "prompt_tokens": prompt, "completion_tokens": 20,
           "quality": {"small": 0.5, "large": 1.0}, "task": "chat", **fields}
    )  # fmt: skip


def run(policy, *turns):
    return simulate({"s": list(turns)}, policies.from_dict(policy), COSTS)


ESCALATE = {"kind": "turns", "escalate_at": 2}


def test_a_session_on_one_tier():
    first, second = run({"kind": "pinned", "tier": "large"}, turn(1, 1000), turn(2, 1100))
    # 1,000 tokens, each attending to half of them on average: 0.5 of a million products.
    assert first.seconds == pytest.approx(1000 * 0.002 + 0.5 + 20 * 0.1)
    assert first.money == pytest.approx((1000 * 1.0 + 20 * 2.0) / 1e6)
    assert first.quality == 1.0 and not first.switched
    # 1,020 are held; 80 are new.
    attended = 80 * (1020 + 40) / 1e6
    assert second.seconds == pytest.approx(80 * 0.002 + attended + 2.0)
    assert second.money == pytest.approx((80 * 1.0 + 1020 * 0.1 + 20 * 2.0) / 1e6)
    assert (second.prefilled, second.mapped) == (80, 0)


def test_a_switch_with_a_map():
    _, second = run(ESCALATE, turn(1, 1000), turn(2, 1100))
    # Small holds 1,020; the last 50 of 1,100 are large's own in any case.
    assert (second.mapped, second.prefilled) == (1020, 80)
    attended = 80 * (1020 + 40) / 1e6
    assert second.seconds == pytest.approx(0.1 + 1020 * 0.0005 + 80 * 0.002 + attended + 2.0)
    assert second.switched and second.quality == pytest.approx(0.9)


def test_a_switch_without_a_map():
    _, second = run({**ESCALATE, "kv": "native"}, turn(1, 1000), turn(2, 1100))
    assert (second.mapped, second.prefilled, second.quality) == (0, 1100, 1.0)


def test_too_little_is_not_mapped():
    _, second = run(ESCALATE, turn(1, 60), turn(2, 140))
    assert (second.mapped, second.prefilled) == (0, 140)


def test_mapped_kv_lasts_until_it_is_made_exact():
    policy = {
        "kind": "adaptive",
        "gain": {"code": 1.0, "chat": 0.0},
        "threshold": 0.5,
        "stability": {"latch_after": 1},
        "kv": {"drift_budget": 0.1},
    }
    turns = run(
        policy,
        turn(1, 1000),
        turn(2, 1100, task="code"),
        turn(3, 1200),
        turn(4, 1300),
        turn(5, 1400),
    )
    assert [one.tier for one in turns] == ["small", "large", "large", "large", "large"]
    # Drift 0.06 and 0.12 after two turns on the map: the fourth is answered natively.
    assert [one.quality for one in turns] == pytest.approx([0.5, 1.0, 0.9, 1.0, 1.0])
    assert turns[3].prefilled == 1300 and turns[4].prefilled == 1400 - 1320


CASCADE = {
    "kind": "adaptive",
    "threshold": 0.5,
    "cascade": {"mode": "early", "tokens": 8, "below": {"low_logprob": -2}},
    "stability": {"min_stay": 1},
}


def test_a_cascade_pays_for_both():
    sure, unsure = (
        run(CASCADE, turn(1, 1000, signals={"low_logprob": value}))[0] for value in (-1, -3)
    )
    assert (sure.tier, sure.quality, sure.escalated) == ("small", 0.5, False)
    assert sure.first_token_seconds == pytest.approx(1.0 + 8 * 0.05)
    assert (unsure.tier, unsure.escalated) == ("large", True)
    # Eight tokens of small's attempt; then its prefill is mapped, the tail of 50 is not.
    small = 1.0 + 8 * 0.05
    attended = 50 * (950 + 25) / 1e6
    large = 0.1 + 950 * 0.0005 + 50 * 0.002 + attended + 2.0
    assert unsure.seconds == pytest.approx(small + large)
    assert unsure.first_token_seconds == pytest.approx(small + large - 2.0)
    assert unsure.money == pytest.approx(
        (1000 * 0.1 + 8 * 0.2) / 1e6 + (50 * 1.0 + 950 * 0.1 + 20 * 2.0) / 1e6
    )
    assert unsure.quality == pytest.approx(0.9)


def test_workers_forget():
    policy = {"kind": "pinned", "tier": "large"}
    _, second = run(policy, turn(1, 1000), turn(2, 1100, idle_seconds=600))
    assert second.prefilled == 1100


def test_budgets_end_a_session():
    policy = {
        "kind": "adaptive",
        "gain": {"chat": 1.0},
        "threshold": 0.5,
        "budgets": {"session": {"large_tokens": 1000}, "at_limit": "reject"},
    }
    first, second = run(policy, turn(1, 1000), turn(2, 1100))
    assert not first.refused and second.refused and (second.money, second.quality) == (0, 0.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(["chat", "math"])), max_size=15))
def test_a_replay_is_repeatable_and_accounts_for_every_token(new):
    turns, prompt = [], 0
    for number, (tokens, task) in enumerate(new, 1):
        prompt += tokens
        turns.append(turn(number, prompt, task=task, signals={"low_logprob": -tokens / 100}))
        prompt += 20
    policy = {**CASCADE, "gain": {"math": 0.9}}
    first, again = run(policy, *turns), run(policy, *turns)
    assert first == again
    for one, recorded in zip(first, turns, strict=True):
        attempts = 2 if one.escalated else 1
        assert 0 <= one.prefilled + one.mapped <= attempts * recorded.prompt_tokens
        assert one.seconds > 0 and one.money > 0


def log_line(number, **fields):
    return {
        "event": "decision", "session": "s", "turn": number, "prompt_tokens": 100 * number,
        "completion_tokens": 10, "scores": {"gain": 0.6}, "task": "math", "time": 1000.0 + number,
        "inputs": {"turn": {"number": number, "has_tools": True}}, **fields,
    }  # fmt: skip


def test_a_decision_log_is_read(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [log_line(2), log_line(1), log_line(3, completion_tokens=None), {"event": "request"}]
    log.write_text("\n".join(map(json.dumps, lines)))
    sessions, skipped = read_sessions(log)
    assert skipped == 2
    assert [(t.turn, t.idle_seconds) for t in sessions["s"]] == [(1, 0.0), (2, 1.0)]
    seen = sessions["s"][0].as_turn()
    assert (seen.gain, seen.task, seen.has_tools) == (0.6, "math", True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"session": "s", "turn": 0, "prompt_tokens": 1, "completion_tokens": 1}', ":1: turn"),
        ("{", ":1: not JSON"),
        ("[]", ":1: expected an object"),
        ('{"event": "request"}', "no answered turns"),
    ],
)
def test_bad_logs_say_where(tmp_path, line, words):
    log = tmp_path / "log.jsonl"
    log.write_text(line)
    with pytest.raises(RecordError, match=words):
        read_sessions(log)


def test_the_command_compares_policies(tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    log.write_text("\n".join(turn(n, 500 * n).model_dump_json() for n in range(1, 6)))
    arguments = ["replay", str(log), "--policy", "large", "--policy", "turns", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["policies"]
    assert set(found) == {"large", "turns"}
    assert found["turns"]["total"] < found["large"]["total"]
    assert found["turns"]["less_first"]["total"]["difference"] < 0
    assert len(json.loads(out.read_text())["by_turn"]["turns"]) == 5
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0 and "turns" in table.output


def test_bad_costs_and_policies_are_one_line(tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text("second_price: -1\n")
    with pytest.raises(RecordError, match=r"costs\.yaml: second_price"):
        read_costs(costs)
    result = CliRunner().invoke(app, ["replay", "none.jsonl", "--policy", "large"])
    assert result.exit_code == 2 and result.output.startswith("baton: ")


def test_the_demo_costs_agree_with_what_was_measured():
    costs = read_costs(DEMO)
    for tokens, rate in ((512, 560), (2048, 450), (6000, 300)):
        seconds = costs.large.prefill_seconds(tokens, 0)
        assert seconds == pytest.approx(tokens / rate, rel=0.03)
    ways = costs.map_to["large"]
    assert ways.transfer_seconds + 2048 * ways.token_seconds == pytest.approx(1.0, rel=0.05)
