"""Eager mapping: a likely switch is mapped before it comes."""

import pytest

from tests.contract.lossy import admin, session
from tests.fakes.pages import tokenize
from tests.stack import Talk, eventually

AHEAD = {"audit_rate": 0.0, "switch_probability": 0.9, "ahead_above": 0.5}


def mapped_ahead(stack, count=1):
    eventually(lambda: stack.metric("baton_ahead_total", outcome="mapped") >= count)


@pytest.mark.parametrize(("gain", "maps"), [(0.19, True), (-0.9, False)])
def test_a_policy_says_itself_how_likely_a_switch_is(make, gain, maps):
    """Whatever the setting says: that stands in for policies without an opinion."""
    policy = {"kind": "adaptive", "gain": {"chat": gain}, "threshold": 0.2}
    stack = make({**AHEAD, "ahead_above": 0.3, "switch_probability": 1.0 - maps}, policy=policy)
    talk = Talk("s")
    assert talk.turn(stack)["x-baton-tier"] == "small"
    if maps:
        mapped_ahead(stack)
    talk.turn(stack)
    assert bool(stack.mapper.seen) is maps


def test_a_likely_switch_is_mapped_ahead_and_used(make):
    stack = make(AHEAD)
    talk = Talk("s")
    talk.turn(stack, model="small")
    mapped_ahead(stack)
    ahead = stack.mapper.seen[0]
    assert ahead["background"] is True
    assert ahead["token_ids"] == tokenize(talk.messages, opened=False)
    lineage = session(stack)["lineages"]["large-model"]
    assert (lineage["kv"], lineage["ahead"]) == ("lossy", True)
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "applied"
    assert stack.mapper.seen[1]["target"] == ahead["target"]
    assert not stack.mapper.seen[1].get("background")
    tokens = stack.metric("baton_ahead_tokens_total", outcome="mapped")
    assert stack.metric("baton_ahead_tokens_total", outcome="used") == tokens > 0
    assert stack.metric("baton_ahead_tokens_total", outcome="wasted") == 0
    assert session(stack)["lineages"]["large-model"]["ahead"] is False


def test_no_switch_in_sight_and_nothing_is_mapped(make):
    stack = make({**AHEAD, "switch_probability": 0.4})
    Talk("s").turn(stack, model="small")
    assert not stack.mapper.seen
    assert stack.metric("baton_ahead_total") == 0


def test_pages_mapped_ahead_for_nothing_are_counted(make):
    policies = {"native": {"kind": "pinned", "tier": "large", "kv": "native"}}
    stack = make({**AHEAD, "ahead_wasted_seconds": 0.2}, policies=policies)
    talk = Talk("s")
    talk.turn(stack, model="small")
    mapped_ahead(stack)
    tokens = stack.metric("baton_ahead_tokens_total", outcome="mapped")
    eventually(lambda: stack.metric("baton_ahead_tokens_total", outcome="wasted") == tokens)
    # A switch on which the policy wants exact KV is a waste, too.
    other = Talk("other")
    other.turn(stack, model="small")
    mapped_ahead(stack, 2)
    other.headers["x-baton-policy"] = "native"
    other.turn(stack)
    tokens = stack.metric("baton_ahead_tokens_total", outcome="mapped")
    assert stack.metric("baton_ahead_tokens_total", outcome="wasted") == tokens
    assert session(stack, "other")["lineages"]["large-model"]["kv"] == "exact"


def test_the_next_turn_cancels_what_is_being_mapped_ahead(make):
    stack = make(AHEAD)
    stack.mapper.delay = 20
    talk = Talk("s")
    talk.turn(stack, model="small")
    eventually(lambda: stack.mapper.seen)
    talk.turn(stack, model="small")
    eventually(lambda: stack.metric("baton_ahead_total", outcome="cancelled") == 1)
    admin(stack, "/s", "delete")
    eventually(lambda: stack.metric("baton_ahead_total", outcome="cancelled") == 2)
    stack.mapper.delay = 0


def test_a_mapper_that_is_away_costs_nothing(make):
    stack = make(AHEAD)
    stack.mapper.fault = "status"
    talk = Talk("s")
    assert talk.turn(stack, model="small")["x-baton-kv"] == "none"
    eventually(lambda: stack.metric("baton_ahead_total", outcome="failed") == 1)
    stack.mapper.fault = None
    assert talk.turn(stack, model="large")["x-baton-kv"] == "applied"
