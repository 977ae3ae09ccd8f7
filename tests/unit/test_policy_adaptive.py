"""The adaptive policy: rules first, then gain against bar, steadied; pure throughout."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies import (
    Economics,
    Memory,
    SessionView,
    Signals,
    Spent,
    TierEconomics,
    Turn,
    escalate,
)

SMALL = {
    "prompt_price": 0.1,
    "completion_price": 0.2,
    "prefill_tokens_per_second": 560,
    "decode_tokens_per_second": 15,
}
LARGE = {
    "prompt_price": 1,
    "completion_price": 2,
    "prefill_tokens_per_second": 400,
    "decode_tokens_per_second": 12,
}
SWITCHING = {"value": 0.02, "second_price": 0.001, "small": SMALL, "large": LARGE}
HARD, EASY = "What is 17 * 23?", "Tell me about penguins."


def adaptive(**sections):
    return policies.from_dict(
        {"kind": "adaptive", "gain": {"math": 0.5}, "threshold": 0.2, **sections}
    )


def turn(text=EASY, **fields):
    return Turn(**{"number": 1, "messages": 1, "prompt_chars": len(text), "text": text, **fields})


def decide(policy, text=EASY, session=None, economics=None, **fields):
    return policy.decide(turn(text, **fields), session or SessionView(), economics or Economics())


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


def test_a_map_makes_a_switch_pay():
    policy = adaptive(threshold=None, switching=SWITCHING, gain={"math": 0.6})
    session = SessionView(tier="small", stay=5, turns=5)
    prompt = {"prompt_tokens": 8000}
    large = {"uncached_tokens": 8000, "prefill_seconds": 20.0}
    native = Economics(tiers={"large": TierEconomics(**large, mapped_share=0)})
    mapped = Economics(tiers={"large": TierEconomics(**large, mapped_share=0.98, map_seconds=3)})
    assert decide(policy, HARD, session, native, **prompt).tier == "small"
    assert decide(policy, HARD, session, mapped, **prompt).tier == "large"
    careful = adaptive(
        threshold=None, switching=SWITCHING, gain={"math": 0.6}, kv={"by_task": {"math": "native"}}
    )
    assert decide(careful, HARD, session, mapped, **prompt).tier == "small"


def test_the_formula_figure_by_figure():
    cached = {"small": {**SMALL, "cached_price": 0.01}, "large": {**LARGE, "cached_price": 0.1}}
    policy = adaptive(
        threshold=None,
        switching={
            **SWITCHING, **cached, "answer_tokens": 100, "stay_turns": 5, "answer_quality": 0.5,
        },
        kv={"retention": {"math": 0.98}},
    )  # fmt: skip
    session = SessionView(tier="small", stay=3)
    live = Economics(
        tiers={
            "small": TierEconomics(uncached_tokens=100, prefill_seconds=0.5, decode_token_seconds=0.1),
            "large": TierEconomics(
                uncached_tokens=1000, prefill_seconds=4.0, decode_token_seconds=0.2,
                mapped_share=0.5, map_seconds=1.0,
            ),
        }
    )  # fmt: skip
    text = HARD.ljust(200)
    scores = decide(policy, text, session, live, prompt_tokens=1000).scores
    assert scores["extra_decode"] == pytest.approx(100 * (2e-6 + 0.2e-3) - 100 * (0.2e-6 + 0.1e-3))
    # The user's 50 tokens are read by either tier, and the rest is cached once caught up.
    large = 950 * 0.1e-6 + 50 * (1e-6 + 4 / 1000 * 1e-3)
    small = 950 * 0.01e-6 + 50 * (0.1e-6 + 0.5 / 100 * 1e-3)
    assert scores["extra_prompt"] == pytest.approx(large - small)
    # Half of what large lacks is mapped; small lacks 50 tokens of its own.
    large = 450 * (0.9e-6 + 4 / 1000 * 1e-3) + 1.0 * 1e-3
    small = 50 * (0.09e-6 + 0.5 / 100 * 1e-3)
    assert scores["extra_catch_up"] == pytest.approx(large - small)
    assert scores["extra_penalty"] == pytest.approx(0.02 * 0.5 * 0.5 * 0.02)
    total = scores["extra_decode"] + scores["extra_prompt"] + scores["extra_penalty"]
    assert scores["bar"] == pytest.approx((total + scores["extra_catch_up"] / 5) / 0.02)


def test_catching_up_is_paid_once_and_serves_several_turns():
    """The longer the conversation, the more a switch must promise, either way; but not as if
    every turn had to pay for all of it."""
    bars = {}
    for stay in (1, 8):
        policy = adaptive(threshold=None, switching={**SWITCHING, "stay_turns": stay})
        for tokens in (1000, 8000):
            for tier in ("small", "large"):
                gone = {"uncached_tokens": tokens, "prefill_seconds": tokens / 400}
                live = Economics(tiers={policies.base.other(tier): TierEconomics(**gone)})
                view = SessionView(tier=tier, stay=9)
                found = decide(policy, EASY, view, live, prompt_tokens=tokens)
                bars[stay, tokens, tier] = found.scores["bar"]
    for tokens in (1000, 8000):
        assert bars[1, tokens, "small"] > bars[8, tokens, "small"]
        assert bars[8, tokens, "small"] > bars[8, tokens, "large"] > bars[1, tokens, "large"]
    apart = [bars[8, n, "small"] - bars[8, n, "large"] for n in (1000, 8000)]
    assert apart[1] > 7 * apart[0]


def test_a_short_gap_is_prefilled_where_a_map_would_be_lived_with():
    """What a map saves, it saves once; what it spoils, it spoils for the rest of the stay."""
    kv, session = {"retention": {"chat": 0.97}}, SessionView(tier="small", stay=5)
    found = {}
    for stay in (1, 10):
        policy = adaptive(threshold=None, switching={**SWITCHING, "stay_turns": stay}, kv=kv)
        for tokens in (1200, 6000):
            gone = {"uncached_tokens": tokens, "mapped_share": 0.95, "map_seconds": 0.5}
            live = Economics(tiers={"large": TierEconomics(**gone, prefill_seconds=tokens / 400)})
            turned = decide(policy, EASY, session, live, prompt_tokens=6000, forced=None)
            found[stay, tokens] = policy.switching.weigh(
                turn(prompt_tokens=6000), session, live, "chat", policy.kv
            ).kv["large"]
            assert turned.tier != "large" or turned.kv == found[stay, tokens]
    assert found == {
        (1, 1200): "map", (1, 6000): "map", (10, 1200): "native", (10, 6000): "map",
    }  # fmt: skip


def test_a_tier_that_was_left_with_mapped_kv_has_its_penalty_on_return():
    policy = adaptive(threshold=None, switching=SWITCHING, kv={"retention": {"chat": 0.9}})
    session = SessionView(tier="small", stay=2)
    penalties = [
        decide(
            policy, EASY, session, prompt_tokens=9000,
            economics=Economics(tiers={"large": TierEconomics(uncached_tokens=100, lossy=lossy)}),
        ).scores["extra_penalty"]
        for lossy in (False, True)
    ]  # fmt: skip
    assert penalties == [0, pytest.approx(0.02 * 0.1)]


def test_how_likely_the_next_turn_is_to_switch():
    policy = adaptive(stability={"min_stay": 3})
    chances = [
        decide(adaptive(gain={"chat": gain}), EASY).scores["switch_probability"]
        for gain in (-0.5, 0.0, 0.15, 0.19)
    ]
    assert chances == sorted(chances) and 0 < chances[0] < 0.01 and 0.4 < chances[-1] < 0.5
    held, free = (
        decide(policy, EASY, SessionView(tier="small", stay=stay, switches_down=1, switches_up=1))
        for stay in (1, 2)
    )
    assert held.scores["switch_probability"] == 0 < free.scores["switch_probability"]
    assert "switch_probability" not in decide(policy, EASY, forced="small").scores


def test_a_map_that_risks_more_than_it_saves_is_not_wanted():
    kv = {"retention": {"math": 0.9}}
    session = SessionView(tier="small", stay=5)
    for tokens, expected in ((300, "native"), (9000, "map")):
        live = Economics(
            tiers={"large": TierEconomics(uncached_tokens=tokens, mapped_share=0.9, map_seconds=1)}
        )
        policy = adaptive(threshold=None, switching=SWITCHING, gain={"math": 1.0}, kv=kv)
        decision = decide(policy, HARD, session, live, prompt_tokens=tokens, max_tokens=20)
        assert decision.kv == expected


def test_going_on_with_mapped_kv_has_its_penalty():
    policy = adaptive(threshold=None, switching=SWITCHING, kv={"retention": {"chat": 0.9}})
    exact, lossy = (
        decide(
            policy, EASY, SessionView(tier="large", stay=3, lossy=lossy), prompt_tokens=9000
        ).scores
        for lossy in (False, True)
    )
    assert exact["extra_penalty"] == 0
    assert lossy["extra_penalty"] == pytest.approx(0.02 * 0.1)
    assert lossy["bar"] == pytest.approx(exact["bar"] + 0.1)


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


# Properties

TIERS = st.sampled_from(["small", "large"])
TIER_ECONOMICS = st.builds(
    TierEconomics,
    available=st.booleans(),
    queued=st.integers(0, 10),
    context_tokens=st.none() | st.integers(1, 10_000),
    uncached_tokens=st.none() | st.integers(0, 10_000),
    prefill_seconds=st.none() | st.floats(0, 60),
    mapped_share=st.none() | st.floats(0, 1),
    map_seconds=st.none() | st.floats(0, 10),
)
ECONOMICS = st.builds(Economics, tiers=st.dictionaries(TIERS, TIER_ECONOMICS))
SESSIONS = st.builds(
    SessionView,
    id=st.text(max_size=8),
    tier=st.none() | TIERS,
    stay=st.integers(0, 9),
    switches_up=st.integers(0, 3),
    idle_seconds=st.floats(0, 5000),
    lossy=st.booleans(),
    drift=st.floats(-1, 1),
    spent=st.builds(Spent, money=st.floats(0, 2), large_tokens=st.integers(0, 2000)),
    memory=st.builds(Memory, wishes=st.integers(0, 4), latched=st.booleans()),
)
TURNS = st.builds(
    turn,
    text=st.text(max_size=60) | st.sampled_from([HARD, EASY]),
    has_tools=st.booleans(),
    tool_loop=st.booleans(),
    forced=st.none() | TIERS,
    prompt_tokens=st.none() | st.integers(0, 20_000),
)
FULL = adaptive(
    switching=SWITCHING,
    budgets={"session": {"money": 1}},
    rules={"tools": "large", "max_queued": 3},
    kv={"drift_budget": 0.3, "by_task": {"math": "hybrid"}, "retention": {"chat": 0.9}},
    cascade={"below": {"low_logprob": -2}},
    classifier={"model": {"weights": {"chars": 0.3, "h12": -1.0}, "bias": -1}},
)


@settings(deadline=None)
@given(TURNS, SESSIONS, ECONOMICS)
def test_decide_is_pure(turn, session, economics):
    before = [one.model_dump_json() for one in (turn, session, economics)]
    first = FULL.decide(turn, session, economics)
    assert FULL.decide(turn, session, economics) == first
    assert [one.model_dump_json() for one in (turn, session, economics)] == before


@settings(deadline=None)
@given(
    hard=st.lists(st.booleans(), min_size=1, max_size=60),
    min_stay=st.integers(1, 6),
    latch_after=st.none() | st.integers(1, 4),
    cascades=st.booleans(),
    doubts=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_no_ping_pong(hard, min_stay, latch_after, cascades, doubts):
    """Whatever the turns and the cascade's verdicts, switches lie min_stay turns apart."""
    sections = {"cascade": {"below": {"low_logprob": -2}}} if cascades else {}
    policy = adaptive(stability={"min_stay": min_stay, "latch_after": latch_after}, **sections)
    session, switched_at = SessionView(), []
    for number, (is_hard, doubt) in enumerate(zip(hard, doubts, strict=False), 1):
        decision = decide(policy, HARD if is_hard else EASY, session, number=number)
        if decision.cascade is not None and doubt:
            verdict = decision.cascade.judge(Signals(tokens=3, low_logprob=-9))
            decision = escalate(decision, verdict)
        if session.tier not in (None, decision.tier):
            switched_at.append(number)
        session = advance(session, decision)
    gaps = [b - a for a, b in pairwise(switched_at)]
    assert all(gap >= min_stay for gap in gaps)


def advance(session, decision):
    """As the gateway does it."""
    same = session.tier == decision.tier
    return session.model_copy(
        update={
            "turns": session.turns + 1,
            "tier": decision.tier,
            "stay": session.stay + 1 if same else 1,
            "switches_up": session.switches_up + (session.tier == "small" and not same),
            "switches_down": session.switches_down + (session.tier == "large" and not same),
            "memory": decision.memory,
        }
    )


def test_alternating_turns_do_switch():
    """The property above is not empty: this session does switch, as often as it may."""
    policy = adaptive(stability={"min_stay": 4, "latch_after": None})
    session, tiers = SessionView(), []
    for number in range(1, 25):
        decision = decide(policy, HARD if number % 2 else EASY, session, number=number)
        session = advance(session, decision)
        tiers.append(decision.tier)
    assert session.switches_up + session.switches_down == 5


def bar(session=None, value=0.02, kv=None, turn_fields=None, **large):
    policy = adaptive(threshold=None, switching={**SWITCHING, "value": value}, kv=kv or {})
    live = Economics(tiers={"large": TierEconomics(**{"uncached_tokens": 2000, **large})})
    session = session or SessionView(tier="small", stay=5)
    fields = {"prompt_tokens": 10_000, **(turn_fields or {})}
    return decide(policy, EASY, session, live, **fields).scores["bar"]


TWO_SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@settings(deadline=None)
@given(TWO_SHARES)
def test_bar_falls_with_the_mapped_share(shares):
    less, more = shares
    assert bar(mapped_share=more) <= bar(mapped_share=less) + 1e-12


@settings(deadline=None)
@given(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)).map(sorted), st.floats(0, 1))
def test_bar_rises_with_what_large_lacks(tokens, share):
    less, more = tokens
    assert bar(uncached_tokens=less, mapped_share=share) <= (
        bar(uncached_tokens=more, mapped_share=share) + 1e-12
    )


@settings(deadline=None)
@given(TWO_SHARES, st.floats(0, 1))
def test_bar_rises_with_drift_and_with_a_worse_card(two, share):
    less, more = two
    kv = {"drift_budget": 5.0}
    drifted = [
        bar(SessionView(tier="small", drift=d), kv=kv, mapped_share=share, retention={"chat": 0.8})
        for d in two
    ]
    assert drifted[0] <= drifted[1] + 1e-12
    cards = [bar(mapped_share=share, retention={"chat": kept}) for kept in (more, less)]
    assert cards[0] <= cards[1] + 1e-12


@settings(deadline=None)
@given(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted))
def test_bar_falls_with_the_value_of_an_answer(values):
    less, more = values
    assert bar(value=more) <= bar(value=less) + 1e-12


@settings(deadline=None)
@given(
    st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(sorted),
    SESSIONS,
    ECONOMICS,
)
def test_more_gain_never_means_the_smaller_tier(gains, session, economics):
    tiers = [
        decide(adaptive(gain={"math": g}, switching=SWITCHING), HARD, session, economics).tier
        for g in gains
    ]
    assert tiers != ["large", "small"]


def test_whoever_has_the_session_has_the_bar_in_its_favour():
    here, there = (bar(SessionView(tier=tier, stay=9)) for tier in ("large", "small"))
    assert here < there
