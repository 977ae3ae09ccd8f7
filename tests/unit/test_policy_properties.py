"""The adaptive policy is pure, does not go to and fro, and never answers more gain with the smaller tier."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Economics, Memory, SessionView, Signals, Spent, TierEconomics, escalate
from tests.adaptive_policy import EASY, HARD, SWITCHING, adaptive, decide, turn

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
