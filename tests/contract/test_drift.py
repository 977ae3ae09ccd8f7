"""Audits, re-anchoring, the drift budget, eager mapping and the operators' view of a session."""

import threading
import time

import httpx
import pytest

from tests.fakes.pages import tokenize
from tests.stack import Stack, Talk, eventually

ALWAYS = {"audit_rate": 1.0, "audit_wait_seconds": 60.0, "audit_piece_tokens": 64}
KEY = {"authorization": "Bearer the-admin-key"}


@pytest.fixture
def make(tmp_path):
    made = []

    def build(drift=ALWAYS, **settings):
        key = tmp_path / "admin.key"
        key.write_text("the-admin-key")
        made.append(Stack(drift=drift, auth={"admin_key_file": str(key)}, **settings))
        return made[-1]

    yield build
    for stack in made:
        eventually(stack.idle)
        stack.stop()


def admin(stack, path="", method="get", **params):
    return httpx.request(
        method, f"{stack.url}/admin/sessions{path}", params=params, headers=KEY, timeout=30
    )


def session(stack, id="s"):
    return admin(stack, f"/{id}").json()


def audited(stack, count=1):
    """Waits until so many audits have ended."""
    eventually(lambda: stack.metric("baton_audits_total") >= count)


def last(worker):
    return worker.seen[-1].body


def switched(stack, talk=None):
    talk = talk or Talk("s")
    talk.turn(stack, model="small")
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "applied"
    return talk


def test_an_audit_measures_and_the_next_turn_is_exact(make):
    stack = make()
    large = stack.large[0]
    large.drift = 0.25
    talk = switched(stack)
    lossy = last(large)["extra_key"]
    audited(stack)
    seen = session(stack)
    turn = seen["timeline"][1]
    assert (turn["kv"], turn["audit"]) == ("applied", "measured")
    assert turn["drift"] == pytest.approx(0.25)
    assert turn["drift_first_token"] == pytest.approx(0.25)
    assert seen["timeline"][0]["audit"] == "none"
    mine = seen["lineages"]["large-model"]
    assert (mine["kv"], mine["reanchored"], mine["drift"]) == ("exact", True, 0.0)
    assert seen["measured"]["up"]["nats_per_token"] == pytest.approx(0.25)
    assert list(seen["measured"]["up"]["by_position"].values()) == pytest.approx([0.25] * 7)
    assert stack.metric("baton_drift_nats_count", direction="up") == 1
    tokens = stack.metric("baton_drift_tokens_total", direction="up")
    assert tokens == turn["completion_tokens"]
    above = stack.metric("baton_drift_signed_nats_total", direction="up", side="above")
    assert above / tokens == pytest.approx(0.25)
    first = stack.metric("baton_drift_signed_nats_total", position="0")
    assert first == pytest.approx(0.25)
    assert stack.metric("baton_drift_first_token_nats_count", direction="up") == 1
    assert stack.metric("baton_reanchored_total", direction="up", by="audit") == 1

    headers = talk.turn(stack, model="large")
    assert (headers["x-baton-kv"], headers["x-baton-kv-reason"]) == ("none", "reanchored")
    assert "extra_key" not in last(large)
    # And it finds the KV that the audit has left: all whole pages but of the new message.
    usage = session(stack)["timeline"][2]
    assert usage["cached_tokens"] >= turn["prompt_tokens"] + turn["completion_tokens"] - 4
    assert lossy not in str(last(large))


def test_what_an_audit_asks_of_the_worker(make):
    stack = make()
    talk = switched(stack)
    audited(stack)
    mapped, *pieces, native = stack.large[0].probes
    prompt = tokenize(talk.messages[:3])
    whole = tokenize(talk.messages, opened=False)
    assert mapped["extra_key"] == stack.mapper.seen[0]["target"]["extra_key"]
    assert mapped["input_ids"] == native["input_ids"] == whole
    assert mapped["logprob_start_len"] == native["logprob_start_len"] == len(prompt) - 1
    for probe in (*pieces, native):
        assert "extra_key" not in probe
    for probe in stack.large[0].probes:
        assert probe["cache_salt"] == "default"
        assert probe["priority"] < 0
        assert probe["sampling_params"]["max_new_tokens"] == 1
    # In pieces, so that nobody waits long behind one.
    assert [len(piece["input_ids"]) for piece in pieces] == list(range(64, len(prompt), 64))
    # The user's own request carries nothing of it.
    assert "logprobs" not in last(stack.large[0])


def test_an_audit_books_what_the_transfer_saved_by_its_own_prefill(make):
    stack = make()
    large = stack.large[0]
    large.seconds_per_token = 0.002
    switched(stack)
    taken = session(stack)["timeline"][1]["mapped_tokens"]
    audited(stack)
    saved = stack.metric("baton_prefill_seconds_saved_total", basis="measured", direction="up")
    lost = stack.metric("baton_prefill_seconds_lost_total", basis="measured", direction="up")
    transfer = stack.metric("baton_kv_transfer_seconds_sum")
    # At least the scripted time; a busy machine adds to it.
    assert saved - lost + transfer > 0.9 * taken * large.seconds_per_token
    assert stack.metric("baton_prefill_seconds_saved_total", basis="estimated") == 0


def test_an_exact_turn_is_not_audited(make):
    stack = make()
    talk = Talk("s")
    for _ in range(3):
        talk.turn(stack, model="small")
    assert not stack.small[0].probes
    assert stack.metric("baton_audits_total") == 0


@pytest.mark.parametrize(("above", "audits"), [(40, 1), (100_000, 0), (None, 0)])
def test_much_mapped_is_always_audited(make, above, audits):
    stack = make({"audit_rate": 0.0, "audit_above_tokens": above})
    switched(stack)
    if audits:
        audited(stack)
    assert session(stack)["timeline"][1]["audit"] == ("measured" if audits else "none")


def test_a_rate_by_policy(make):
    drift = {"audit_rate": 0.0, "audit_rates": {"watched": 1.0}}
    stack = make(drift, policies={"watched": {"kind": "turns", "escalate_at": 2}})
    switched(stack, Talk("unwatched"))
    talk = Talk("watched")
    talk.headers["x-baton-policy"] = "watched"
    switched(stack, talk)
    audited(stack)
    assert session(stack, "watched")["timeline"][1]["audit"] == "measured"
    assert session(stack, "unwatched")["timeline"][1]["audit"] == "none"


def test_a_busy_worker_is_not_audited(make):
    stack = make({**ALWAYS, "audit_wait_seconds": 0.3})
    large = stack.large[0]
    large.active = 1  # of another gateway's
    try:
        talk = switched(stack)
        audited(stack)
    finally:
        large.active = 0
    assert stack.metric("baton_audits_total", direction="up", outcome="busy") == 1
    assert not large.probes
    assert session(stack)["timeline"][1]["audit"] == "busy"
    # The lineage stays what it is.
    assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"


def test_an_audit_waits_for_the_users_to_be_done(make):
    stack = make()
    large = stack.large[0]
    large.active = 1
    switched(stack)
    time.sleep(0.3)
    assert not large.probes
    large.active = 0
    audited(stack)
    assert session(stack)["timeline"][1]["audit"] == "measured"


def test_a_failing_audit_changes_nothing(make):
    stack = make()
    stack.large[0].probe_fault = 500
    talk = switched(stack)
    audited(stack)
    assert session(stack)["timeline"][1]["audit"] == "worker_failed"
    stack.large[0].probe_fault = None
    assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"
    assert stack.metric("baton_worker_breaker_state", worker="large-0") == 0


def test_a_full_queue_drops_audits(make):
    stack = make({**ALWAYS, "audit_queue": 1})
    stack.large[0].active = 1
    for number in range(4):
        switched(stack, Talk(f"s{number}"))
    stack.large[0].active = 0
    # One is being worked on, one waits.
    assert stack.metric("baton_audits_total", outcome="queue_full") == 2
    audited(stack, 4)


def test_an_answer_whose_lineage_has_gone_is_not_measured_but_reanchored(make):
    stack = make()
    large = stack.large[0]
    large.active = 1
    switched(stack)
    stack.store.namespaces.pop(("large-model", last(large)["extra_key"], "default"))
    large.active = 0
    audited(stack)
    turn = session(stack)["timeline"][1]
    assert (turn["audit"], turn["drift"]) == ("reanchored", None)
    assert session(stack)["lineages"]["large-model"]["kv"] == "exact"
    assert stack.metric("baton_drift_nats_count") == 0


# The budget


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


# Many turns


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


# Eager mapping

AHEAD = {"audit_rate": 0.0, "switch_probability": 0.9, "ahead_above": 0.5}


def mapped_ahead(stack, count=1):
    eventually(lambda: stack.metric("baton_ahead_total", outcome="mapped") >= count)


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


# The operators' view


def test_sessions_are_listed_latest_first_in_pages(make):
    stack = make({"audit_rate": 0.0})
    for number in range(5):
        Talk(f"s{number}").turn(stack, model="small")
    Talk("s1").turn(stack, model="small")
    whole = admin(stack).json()
    assert [one["id"] for one in whole["sessions"]] == ["s1", "s4", "s3", "s2", "s0"]
    assert whole["next"] is None
    first = admin(stack, limit=2).json()
    second = admin(stack, limit=2, before=first["next"]).json()
    assert [one["id"] for one in first["sessions"] + second["sessions"]] == ["s1", "s4", "s3", "s2"]
    for bad in ({"limit": 0}, {"limit": "x"}, {"before": "nan"}, {"before": "x"}):
        assert admin(stack, **bad).status_code == 400


def test_the_timeline_says_what_each_turn_ran_on(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    talk.turn(stack, model="large")
    seen = session(stack)
    assert [(t["number"], t["tier"], t["kv"]) for t in seen["timeline"]] == [
        (1, "small", "none"), (2, "large", "applied"), (3, "large", "continued"),
    ]  # fmt: skip
    assert seen["turns"] == 3 and seen["switches_up"] == 1 and seen["kv"] == "lossy"
    assert seen["timeline"][1]["mapped_tokens"] > 40
    assert seen["lineages"]["small-model"]["kv"] == "exact"
    # Nothing that was said is in it.
    assert "word" not in admin(stack, "/s").text


def test_an_operator_reanchors(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    answer = admin(stack, "/s/reanchor", "post").json()
    assert answer["lineages"]["large-model"]["kv"] != "lossy"
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "none"
    assert "extra_key" not in last(stack.large[0])
    assert admin(stack, "/nosuch/reanchor", "post").status_code == 404


def test_a_deleted_session_starts_anew_in_a_namespace_of_its_own(make):
    stack = make({"audit_rate": 0.0})
    switched(stack)
    first = last(stack.large[0])["extra_key"]
    assert admin(stack, "/s", "delete").status_code == 204
    assert admin(stack, "/s").status_code == 404
    switched(stack)
    assert last(stack.large[0])["extra_key"] != first


def test_a_session_named_like_a_path(make):
    stack = make({"audit_rate": 0.0})
    Talk("a/b c/reanchor").turn(stack, model="small")
    url = f"{stack.url}/admin/sessions/a%2Fb%20c%2Freanchor"
    assert httpx.get(url, headers=KEY).json()["id"] == "a/b c/reanchor"


def test_a_worker_that_was_away_leaves_its_lineage_unconfirmed(make):
    stack = make({"audit_rate": 0.0})
    talk = switched(stack)
    assert session(stack)["lineages"]["large-model"]["confirmed"]
    stack.large[0].healthy = False
    eventually(lambda: stack.metric("baton_worker_up", worker="large-0") == 0)
    stack.large[0].healthy = True
    eventually(lambda: stack.metric("baton_worker_up", worker="large-0") == 1)
    lineages = session(stack)["lineages"]
    assert not lineages["large-model"]["confirmed"] and lineages["small-model"]["confirmed"]
    talk.turn(stack, model="large")
    assert session(stack)["lineages"]["large-model"]["confirmed"]


def test_two_turns_of_a_session_at_once(make):
    stack = make({"audit_rate": 0.0})
    talk = Talk("s")
    talk.turn(stack, model="small")
    stack.large[0].seconds_per_word = 0.02
    copies = [Talk("s") for _ in range(4)]
    for copy in copies:
        copy.messages = list(talk.messages)
    threads = [
        threading.Thread(target=copy.turn, args=(stack,), kwargs={"model": "large"})
        for copy in copies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    seen = session(stack)
    assert seen["turns"] == 5
    assert [turn["number"] for turn in seen["timeline"]] == [1, 2, 3, 4, 5]
    epochs = {turn["epoch"] for turn in seen["timeline"][1:]}
    assert len(epochs) == 4, "each began a lineage of its own"
    assert seen["lineages"]["large-model"]["epoch"] in epochs
