"""What a switch costs and what it must promise: the formula, and how the bar moves with each of its parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies import Economics, SessionView, TierEconomics
from tests.adaptive_policy import EASY, HARD, LARGE, SMALL, SWITCHING, adaptive, decide, turn


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


def test_whoever_has_the_session_has_the_bar_in_its_favour():
    here, there = (bar(SessionView(tier=tier, stay=9)) for tier in ("large", "small"))
    assert here < there
