"""The adaptive policy: rules first, then gain against threshold, steadied; KV and cascades."""

from __future__ import annotations

import math

import pytest

from policies import Economics, Memory, SessionView, Signals, Spent, TierEconomics, escalate
from tests.adaptive_policy import EASY, HARD, SWITCHING, adaptive, decide


def test_gain_against_threshold():
    hard, easy = decide(adaptive(), HARD), decide(adaptive(), EASY)
    assert (hard.tier, hard.stage, hard.reason, hard.task) == (
        "large", "gain", "gain_above_bar", "math",
    )  # fmt: skip
    assert (easy.tier, easy.reason, easy.task) == ("small", "gain_below_bar", "chat")
    assert hard.scores["gain"] == 0.5 and hard.scores["bar"] == 0.2


@pytest.mark.parametrize(
    ("sections", "fields", "session", "economics", "expected"),
    [
        ({}, {"forced": "large"}, {}, {}, ("large", "forced", "forced")),
        ({"rules": {"tools": "large"}}, {"has_tools": True}, {}, {}, ("large", "rules", "tools")),
        ({"rules": {"schema": "large"}}, {"has_schema": True}, {}, {}, ("large", "rules", "schema")),
        ({}, {"tool_loop": True}, {"tier": "large"}, {}, ("large", "rules", "tool_loop")),
        ({"rules": {"tools": "large"}}, {"tool_loop": True, "has_tools": True}, {"tier": "small"}, {},
         ("small", "rules", "tool_loop")),
        ({}, {"prompt_tokens": 3900, "tool_loop": True}, {"tier": "small"},
         {"small": {"context_tokens": 4096}}, ("large", "rules", "context_length")),
        ({}, {"prompt_tokens": 3900, "max_tokens": 100}, {}, {"small": {"context_tokens": 4096}},
         ("small", "gain", "gain_below_bar")),
        ({}, {}, {}, {"small": {"available": False}}, ("large", "rules", "small_down")),
        ({}, {"text": HARD}, {}, {"large": {"available": False}}, ("small", "rules", "large_down")),
        ({"rules": {"max_queued": 2}}, {"text": HARD}, {}, {"large": {"queued": 3}},
         ("small", "rules", "large_busy")),
        ({"rules": {"max_queued": 2}}, {"text": HARD}, {"tier": "large"}, {"large": {"queued": 3}},
         ("large", "gain", "gain_above_bar")),
    ],
)  # fmt: skip
def test_hard_rules(sections, fields, session, economics, expected):
    live = Economics(tiers={tier: TierEconomics(**one) for tier, one in economics.items()})
    decision = decide(
        adaptive(**sections), session=SessionView(**session), economics=live, **fields
    )
    assert (decision.tier, decision.stage, decision.reason) == expected


@pytest.mark.parametrize(
    ("limit", "spent", "reason"),
    [
        ({"session": {"money": 1}}, {"spent": Spent(money=1)}, "budget_session_money"),
        ({"tenant": {"large_tokens": 100}}, {"tenant_spent": Spent(large_tokens=100)},
         "budget_tenant_large_tokens"),
    ],
)  # fmt: skip
def test_budgets(limit, spent, reason):
    session = SessionView(**spent)
    degraded = decide(adaptive(budgets=limit), HARD, session, forced="large")
    assert (degraded.tier, degraded.stage, degraded.reason) == ("small", "budget", reason)
    assert degraded.rejection is None and degraded.cascade is None
    refused = decide(
        adaptive(budgets={**limit, "at_limit": "reject", "status": 429}), HARD, session
    )
    assert (refused.rejection.status, refused.rejection.code) == (429, reason)
    assert decide(adaptive(budgets=limit), HARD).tier == "large"


def test_latch_and_idle_decay():
    policy = adaptive(stability={"latch_after": 2, "min_stay": 1, "idle_seconds": 60})
    first = decide(policy, HARD)
    second = decide(policy, HARD, SessionView(tier="large", stay=1, memory=first.memory))
    assert (first.memory, second.memory) == (Memory(wishes=1), Memory(wishes=2, latched=True))
    latched = SessionView(tier="large", stay=2, switches_up=1, memory=second.memory)
    easy = decide(policy, EASY, latched)
    assert (easy.tier, easy.stage, easy.reason) == ("large", "stability", "latched")
    rested = decide(policy, EASY, latched.model_copy(update={"idle_seconds": 60}))
    assert rested.tier == "small" and rested.memory == Memory()


def test_hysteresis_holds_both_ways():
    policy = adaptive(gain={"math": 0.25}, stability={"hysteresis": 0.1, "latch_after": None})
    assert decide(policy, HARD, SessionView(tier="small", stay=9)).tier == "small"
    assert decide(policy, HARD, SessionView(tier="large", stay=9)).tier == "large"
    assert decide(policy, HARD).tier == "large"
    wide = adaptive(gain={"chat": 0.15}, stability={"hysteresis": 0.1, "latch_after": None})
    assert decide(wide, EASY, SessionView(tier="large", stay=9)).tier == "large"
    assert decide(wide, EASY).tier == "small"


@pytest.mark.parametrize(
    ("kv", "text", "drift", "retention", "expected"),
    [
        ({}, EASY, 0, {}, "map"),
        ({"by_task": {"math": "native", "quote": "hybrid"}}, HARD, 0, {}, "native"),
        ({"by_task": {"quote": "hybrid"}}, "Quote the first line.", 0, {}, "hybrid"),
        ({"drift_budget": 0.1}, EASY, 0.11, {}, "native"),
        ({"drift_budget": 0.1}, EASY, 0.1, {}, "map"),
        ({"min_retention": 0.9, "retention": {"chat": 0.8}}, EASY, 0, {}, "native"),
        ({"min_retention": 0.9, "retention": {"chat": 0.8}}, EASY, 0, {"chat": 0.95}, "map"),
    ],
)
def test_kv_by_task_card_and_drift(kv, text, drift, retention, expected):
    live = Economics(tiers={t: TierEconomics(retention=retention) for t in ("small", "large")})
    assert decide(adaptive(kv=kv), text, SessionView(drift=drift), live).kv == expected


def test_cascade_follows_small_turns_only():
    policy = adaptive(
        cascade={"below": {"low_logprob": -2}},
        kv={"by_task": {"code": "native"}},
        stability={"min_stay": 3},
    )
    pending = decide(policy, "Why does def f() fail?")
    assert pending.tier == "small" and pending.cascade.kv == "native"
    verdict = pending.cascade.judge(Signals(tokens=5, low_logprob=-3.0))
    after = escalate(pending, verdict)
    assert (after.tier, after.stage, after.reason) == ("large", "cascade", "cascade_low_logprob")
    assert after.kv == "native" and after.cascade is None and after.memory == Memory(wishes=1)
    assert not pending.cascade.judge(Signals(tokens=5, low_logprob=-1.0)).escalate
    assert not pending.cascade.judge(Signals(tokens=0)).escalate
    assert decide(policy, HARD).cascade is None
    held = SessionView(tier="small", stay=1, switches_down=1)
    assert decide(policy, EASY, held).cascade is None
    gone = Economics(tiers={"large": TierEconomics(available=False)})
    assert decide(policy, EASY, economics=gone).cascade is None


def test_a_learned_cascade_takes_its_bar_from_the_economics():
    policy = adaptive(
        threshold=None,
        switching=SWITCHING,
        cascade={"score": {"bias": 0, "weights": {"mean_logprob": -1.0}}},
    )
    pending = decide(policy, EASY, max_tokens=32)
    # Half of small's 32 tokens are paid for by the time of the judgement, and its prefill.
    small, large = 32 * (0.2e-6 + 1e-3 / 15), 32 * (2e-6 + 1e-3 / 12)
    prefill = 5 * 1e-6 + 5 / 400 * 1e-3
    expected = (large + prefill - small / 2) / 0.02
    assert pending.cascade.threshold == pytest.approx(expected, rel=1e-3)
    assert pending.cascade.threshold > pending.scores["bar"]
    unsure, sure = (
        pending.cascade.judge(Signals(tokens=9, mean_logprob=value)) for value in (-3.0, -0.1)
    )
    assert (unsure.escalate, unsure.reason, sure.escalate) == (True, "score", False)
    assert unsure.gain > pending.cascade.threshold > sure.gain


def test_a_cascade_knows_what_was_expected_before_the_answer():
    score = {"weights": {"prior": 3.0, "margin": -1.0}, "fill": {"prior": 0.0}}
    policy = adaptive(
        cascade={"score": score, "threshold": 0.1},
        classifier={"model": {"weights": {"chars": 0.05}, "bias": -0.1}},
        threshold=0.9,
    )
    verdicts = []
    for text in ("hi", EASY * 9):
        pending = decide(policy, text)
        assert pending.cascade.prior == pending.scores["gain"]
        verdicts.append(pending.cascade.judge(Signals(tokens=4, margin=0.2)).gain)
    assert verdicts[0] < verdicts[1]
    z = 3 * pending.cascade.prior - math.log1p(0.2)
    assert verdicts[1] == pytest.approx(2 / (1 + math.exp(-z)) - 1)
