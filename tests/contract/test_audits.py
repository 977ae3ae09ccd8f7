"""Audits: what they ask, when they run and when they give way, and what they leave behind."""

import asyncio
import time

import pytest

from tests.contract.lossy import ALWAYS, admin, audited, last, session, switched
from tests.fakes.pages import tokenize
from tests.stack import Stack, Talk, eventually


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
    mapped, *exact = stack.large[0].probes
    prompt = tokenize(talk.messages[:3])
    whole = tokenize(talk.messages, opened=False)
    assert mapped["extra_key"] == stack.mapper.seen[0]["target"]["extra_key"]
    assert mapped["input_ids"] == whole
    assert mapped["logprob_start_len"] == len(prompt) - 1
    for probe in exact:
        assert "extra_key" not in probe
        assert probe["input_ids"] == whole[: len(probe["input_ids"])]
    for probe in stack.large[0].probes:
        assert probe["cache_salt"] == "default"
        assert probe["priority"] < 0
        assert probe["sampling_params"]["max_new_tokens"] == 1
    # In pieces, so that nobody waits long behind one; the answer may be in several of them.
    lengths = [len(probe["input_ids"]) for probe in exact]
    assert lengths == [*range(64, len(whole), 64), len(whole)]
    begins = [probe.get("logprob_start_len", -1) + 1 for probe in exact]
    assert begins == [
        0 if end <= len(prompt) else max(len(prompt), begin)
        for begin, end in zip([0, *lengths], lengths, strict=False)
    ]
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


@pytest.mark.parametrize("part", ["current", "candidate"])
def test_a_rate_by_the_part_of_a_rollout_that_decided(make, part):
    turns = {"kind": "turns", "escalate_at": 2}
    rollout = {
        "kind": "rollout", "mode": "canary", "percent": 100 if part == "candidate" else 0,
        "current": turns, "candidate": turns,
    }  # fmt: skip
    drift = {"audit_rate": 0.0, "audit_rates": {"default": 0.0, "default.candidate": 1.0}}
    stack = make(drift, policy=rollout)
    switched(stack)
    if part == "candidate":
        audited(stack)
    expected = "measured" if part == "candidate" else "none"
    assert session(stack)["timeline"][1]["audit"] == expected


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


@pytest.mark.parametrize("busy", ["small", "large"])
def test_an_audit_waits_for_all_users_of_the_device(make, busy):
    stack = make()
    (worker,) = getattr(stack, busy)
    worker.active = 1
    switched(stack)
    time.sleep(0.3)
    assert not stack.large[0].probes
    worker.active = 0
    audited(stack)
    assert session(stack)["timeline"][1]["audit"] == "measured"


def test_a_waiting_audit_gives_way_to_that_of_the_sessions_next_turn(make):
    stack = make()
    large = stack.large[0]
    large.active = 1
    talks = [switched(stack, Talk(name)) for name in ("first", "s", "other")]
    for _ in range(2):
        talks[1].turn(stack, model="large")
    assert not large.probes
    large.active = 0
    audited(stack, 5)
    turns = session(stack)["timeline"]
    assert [turn["audit"] for turn in turns[1:]] == ["superseded", "superseded", "measured"]
    for name in ("first", "other"):
        assert session(stack, name)["timeline"][1]["audit"] == "measured"
    # What the last one has left behind serves the whole session.
    assert talks[1].turn(stack, model="large")["x-baton-kv-reason"] == "reanchored"


def test_a_deleted_sessions_audits_end(make):
    stack = make()
    large = stack.large[0]
    large.active = 1
    talks = [switched(stack, Talk(name)) for name in ("under way", "waiting", "kept")]
    for name in ("under way", "waiting"):
        assert admin(stack, f"/{name}", "delete").status_code == 204
    large.active = 0
    audited(stack, 3)
    assert session(stack, "kept")["timeline"][1]["audit"] == "measured"
    assert stack.metric("baton_audits_total", direction="up", outcome="forgotten") == 2
    asked = {tuple(probe["input_ids"][:12]) for probe in large.probes}
    assert asked == {tuple(tokenize(talks[2].messages, opened=False)[:12])}


def test_a_worker_on_another_device_is_not_waited_for(make):
    stack = make(own_devices=True)
    stack.small[0].active = 1
    switched(stack)
    audited(stack)
    assert session(stack)["timeline"][1]["audit"] == "measured"
    stack.small[0].active = 0


def test_a_worker_that_is_away_is_not_waited_for(make):
    stack = make()
    small = stack.small[0]
    talk = Talk("s")
    talk.turn(stack, model="small")
    small.healthy, small.active = False, 1
    eventually(lambda: stack.metric("baton_worker_up", worker="small-0") == 0)
    talk.turn(stack, model="large")
    audited(stack)
    assert session(stack)["timeline"][1]["audit"] == "measured"
    small.active = 0


def held_at(*held):
    """Audits' requests for exact KV of so many tokens take for ever."""
    return lambda body: 600 * ("extra_key" not in body and len(body["input_ids"]) in held)


@pytest.mark.parametrize("who", ["another session, at another worker", "the session itself"])
def test_a_user_ends_the_running_piece_and_it_is_done_later(make, who):
    stack = make()
    large = stack.large[0]
    large.drift = 0.25
    large.probe_seconds = held_at(128)
    talk = switched(stack)
    eventually(lambda: [len(p["input_ids"]) for p in large.probes[1:]] == [64, 128])
    if who == "the session itself":
        assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"
    else:
        Talk("other").turn(stack, model="small")
    eventually(lambda: len(large.aborted_probes) >= 1)
    large.probe_seconds = lambda body: 0.0
    # The session's second turn has an audit of its own.
    audited(stack, 2 if who == "the session itself" else 1)
    turn = session(stack)["timeline"][1]
    assert (turn["audit"], turn["drift"]) == ("measured", pytest.approx(0.25))
    # What was done before is not done again.
    lengths = [len(probe["input_ids"]) for probe in large.probes[1:]]
    assert lengths[: lengths.index(192)].count(64) == 1
    aborted = stack.metric("baton_audit_piece_seconds_count", outcome="aborted")
    assert aborted == len(large.aborted_probes)
    headers = talk.turn(stack, model="large")
    assert (headers["x-baton-kv"], headers["x-baton-kv-reason"]) == ("none", "reanchored")


def test_a_user_on_another_device_ends_nothing(make):
    stack = make(own_devices=True)
    large = stack.large[0]
    large.probe_seconds = held_at(128)
    switched(stack)
    eventually(lambda: len(large.probes) == 3)
    Talk("other").turn(stack, model="small")
    Talk("another").turn(stack, model="small")
    assert large.active == 1 and not large.aborted_probes
    # One on its own does.
    Talk("third").turn(stack, model="large")
    eventually(lambda: large.aborted_probes)
    large.probe_seconds = lambda body: 0.0
    audited(stack)


def test_a_switch_ends_a_piece_before_its_worker_is_asked(make):
    """For the mapper, too, needs what the audit has."""
    stack = make()
    large = stack.large[0]
    other = Talk("other")
    other.turn(stack, model="small")
    large.probe_seconds = held_at(128)
    switched(stack)
    eventually(lambda: len(large.probes) == 3)
    prepare = stack.gateway.transfers.prepare

    async def once_aborted(*args):
        for _ in range(1000):
            if large.aborted_probes:
                break
            await asyncio.sleep(0.01)
        before.append(len(large.aborted_probes))
        return await prepare(*args)

    before = []
    stack.gateway.transfers.prepare = once_aborted
    other.turn(stack, model="large")
    assert before == [1]
    large.probe_seconds = lambda body: 0.0
    audited(stack, 2)


def test_an_answer_is_not_scored_twice_on_its_lineage(make):
    """A first try may have computed anew what was gone, and a second would find that."""
    stack = make()
    large = stack.large[0]
    large.drift = 0.25
    large.probe_seconds = lambda body: 600.0 if "extra_key" in body else 0.0
    talk = switched(stack)
    eventually(lambda: large.probes)
    Talk("other").turn(stack, model="small")
    audited(stack)
    assert [probe["logprob_start_len"] for probe in large.aborted_probes]
    turn = session(stack)["timeline"][1]
    assert (turn["audit"], turn["drift"]) == ("reanchored", None)
    assert stack.metric("baton_drift_nats_count") == 0
    assert talk.turn(stack, model="large")["x-baton-kv-reason"] == "reanchored"


def test_a_gateway_that_stops_gives_up_its_audit():
    stack = Stack(drift=ALWAYS)
    large = stack.large[0]
    large.probe_seconds = held_at(128)
    switched(stack)
    eventually(lambda: len(large.probes) == 3)
    try:
        stack.server._loop.call_soon_threadsafe(stack.server.drain)
        stack.front.thread.join(20)
        eventually(lambda: large.aborted_probes and not large.active)
    finally:
        for server in stack.servers.values():
            server.stop()


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
