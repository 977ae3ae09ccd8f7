"""The drift budget, and drift over many turns."""

import pytest

from tests.contract.lossy import ALWAYS, audited, last, session, switched
from tests.stack import Talk, eventually


def test_past_its_budget_a_session_is_native(make):
    stack = make({"budget_nats": 0.25, "expected_nats": 0.1})
    talk = switched(stack)
    kinds = [talk.turn(stack, model="large") for _ in range(4)]
    assert [(h["x-baton-kv"], h["x-baton-kv-reason"]) for h in kinds] == [
        ("continued", "same_model"),
        ("continued", "same_model"),
        ("native", "drift_budget"),
        ("none", "same_model"),
    ]
    drifts = [turn["drift_expected"] for turn in session(stack)["timeline"]]
    assert drifts == pytest.approx([0, 0.1, 0.1, 0.1, 0, 0])
    assert stack.metric("baton_kv_transfer_total", reason="drift_budget") == 1


def test_what_has_drifted_too_far_is_not_mapped_on(make):
    stack = make({"budget_nats": 0.15, "expected_nats": 0.1})
    talk = switched(stack)
    talk.turn(stack, model="large")
    headers = talk.turn(stack, model="small")
    assert (headers["x-baton-kv"], headers["x-baton-kv-reason"]) == ("native", "drift_budget")
    assert len(stack.mapper.seen) == 1


def test_drift_of_the_source_counts_for_the_target(make):
    stack = make({"budget_nats": 9, "expected_nats": 0.1})
    talk = switched(stack)
    talk.turn(stack, model="small")
    lineages = session(stack)["lineages"]
    assert lineages["large-model"]["drift"] == pytest.approx(0.1)
    assert lineages["small-model"]["drift"] == pytest.approx(0.2)


def test_what_was_measured_is_expected_of_the_next(make):
    stack = make({**ALWAYS, "expected_nats": 0.1})
    stack.large[0].drift = 0.5
    switched(stack)
    audited(stack)
    switched(stack, Talk("other"))
    assert session(stack, "other")["timeline"][1]["drift_expected"] == pytest.approx(0.3)


def test_a_policy_may_ask_for_exact_kv_on_the_same_model(make):
    policies = {"native": {"kind": "pinned", "tier": "large", "kv": "native"}}
    stack = make({"audit_rate": 0.0}, policies=policies)
    talk = switched(stack)
    talk.headers["x-baton-policy"] = "native"
    headers = talk.turn(stack)
    assert (headers["x-baton-kv"], headers["x-baton-kv-reason"]) == ("native", "policy")
    assert "extra_key" not in last(stack.large[0])


@pytest.mark.parametrize("audits", [False, True])
def test_twenty_alternating_turns(make, audits):
    """Each page is mapped at most once a direction; audited, the error does not grow."""
    drift = {**ALWAYS, "budget_nats": 0.4} if audits else {"audit_rate": 0.0, "budget_nats": 99}
    stack = make(drift, transfers={"min_mapped_tokens": 8})
    for worker in (*stack.small, *stack.large):
        worker.drift = 0.15
    talk = Talk("s")
    for number in range(20):
        model = ("small", "large")[number % 2]
        talk.turn(stack, text="word " * 12, model=model)
        if audits:
            lossy = [t for t in session(stack)["timeline"] if t["epoch"]]
            audited(stack, len(lossy))
            eventually(lambda: all(t["audit"] != "pending" for t in session(stack)["timeline"]))
    seen = session(stack)
    assert len(seen["timeline"]) == 20
    for direction in ("up", "down"):
        mapped = stack.metric("baton_kv_transferred_tokens_total", direction=direction)
        assert 0 < mapped <= seen["timeline"][-1]["prompt_tokens"]
    worst = max(turn["drift_expected"] for turn in seen["timeline"])
    if audits:
        # Exact KV of all but the last turn is there at every switch, on both sides.
        assert all(one["kv"] == "exact" for one in seen["lineages"].values())
        assert all(one["drift"] == 0 for one in seen["lineages"].values())
        assert worst < 0.4
    else:
        # One lossy lineage a model from beginning to end, and a drift that adds up.
        assert len({turn["epoch"] for turn in seen["timeline"] if turn["epoch"]}) == 2
        assert max(one["drift"] for one in seen["lineages"].values()) == pytest.approx(1.9)
