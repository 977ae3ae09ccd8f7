"""Parts go away in the middle of sessions: no wrong lineage is used, and state heals."""

import httpx
import pytest

from tests.contract.lossy import KEY, session
from tests.fakes.faults import Fault
from tests.fakes.server import Threaded
from tests.stack import Stack, Talk, eventually

ALWAYS = {"audit_rate": 1.0, "audit_wait_seconds": 60.0}


@pytest.fixture
def make(make_stack, tmp_path):
    key = tmp_path / "admin.key"
    key.write_text(KEY["authorization"].removeprefix("Bearer "))
    return lambda **options: make_stack(auth={"admin_key_file": str(key)}, **options)


def lineage(stack):
    return stack.large[0].seen[-1].body.get("extra_key")


def switched(stack, talk):
    talk.turn(stack, model="small")
    assert talk.turn(stack, model="large")["x-baton-kv"] == "applied"
    return lineage(stack)


def test_another_gateway_goes_on_where_one_has_died(make, redis_server):
    two = make(redis_url=redis_server.url)
    one = Stack(redis_url=redis_server.url)
    talk = Talk("s")
    try:
        first = switched(one, talk)
    finally:
        one.stop()
    assert talk.turn(two, model="large")["x-baton-kv"] == "continued"
    assert lineage(two) == first
    assert session(two)["turns"] == 3


def test_two_gateways_audit_and_go_on_with_one_session(make, redis_server):
    """One gateway's audit re-anchors; the other's turn that was under way changes nothing of it."""
    one = make(redis_url=redis_server.url)
    two = make(redis_url=redis_server.url, drift=ALWAYS)
    for worker, same in zip((*two.small, *two.large), (*one.small, *one.large), strict=True):
        worker.store = same.store
    two.mapper.store = one.store
    talk = Talk("s")
    switched(two, talk)
    eventually(lambda: session(one)["timeline"][1]["audit"] == "measured")
    assert talk.turn(one, model="large")["x-baton-kv-reason"] == "reanchored"
    assert lineage(one) is None


def test_a_redis_that_lost_everything_starts_a_lineage_of_its_own(make, redis_server):
    stack = make(redis_url=redis_server.url)
    talk = Talk("s")
    first = switched(stack, talk)
    redis_server.client().flushall()
    # Nothing is known of the session: exact KV, or a prefill.
    assert talk.turn(stack, model="large")["x-baton-kv"] == "none"
    assert lineage(stack) is None
    talk.turn(stack, model="small")
    talk.turn(stack, model="large")
    assert lineage(stack) != first
    assert session(stack)["lineages"]["large-model"]["kv"] in ("exact", "lossy")


def test_redis_goes_between_a_turn_and_its_audit(make, redis_server):
    stack = make(redis_url=redis_server.url, drift=ALWAYS)
    talk = Talk("s")
    stack.large[0].active = 1
    first = switched(stack, talk)
    redis_server.stop()
    stack.large[0].active = 0
    eventually(
        lambda: stack.metric("baton_audits_total", outcome="session_store_down") == 1, seconds=20
    )
    redis_server.start()
    eventually(lambda: stack.metric("baton_session_store_up") == 1)
    # Nobody wrote down that it is exact by now, so it is not taken for exact.
    assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"
    assert lineage(stack) == first


def test_a_worker_that_lost_its_pages_answers_and_its_audit_measures_nothing(make):
    stack = make(drift=ALWAYS)
    talk = Talk("s")
    stack.large[0].active = 1
    switched(stack, talk)
    stack.store.namespaces.clear()
    stack.large[0].active = 0
    eventually(lambda: session(stack)["timeline"][1]["audit"] != "none")
    assert session(stack)["timeline"][1]["audit"] == "reanchored"
    assert talk.turn(stack, model="large")["x-baton-kv"] == "none"


def test_a_worker_dies_during_an_audit(make):
    stack = make(drift=ALWAYS)
    large, server = stack.large[0], stack.servers["large-0"]
    talk = Talk("s")
    large.active = 1
    first = switched(stack, talk)
    server.stop()
    large.active = 0
    eventually(lambda: stack.metric("baton_audits_total", outcome="worker_failed") == 1)
    stack.servers["large-0"] = Threaded(large.app(), port=server.port).start()
    eventually(lambda: httpx.get(f"{stack.url}/ready").json()["missing"] == [])
    assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"
    assert lineage(stack) == first


def test_the_mapper_dies_while_it_maps_ahead(make):
    stack = make(drift={"switch_probability": 0.9})
    stack.mapper.delay = 2
    talk = Talk("s")
    talk.turn(stack, model="small")
    eventually(lambda: stack.mapper.seen)
    port = stack.servers["mapper"].port
    stack.servers["mapper"].stop()
    eventually(lambda: stack.metric("baton_ahead_total", outcome="failed") == 1)
    assert talk.turn(stack, model="large")["x-baton-kv"] == "native"
    assert lineage(stack) is None
    # What was reserved for the pages is given up with that turn.
    assert session(stack)["lineages"]["large-model"]["kv"] == "exact"
    stack.mapper.delay = 0
    stack.servers["mapper"] = Threaded(stack.mapper.app(), port=port).start()


def test_a_load_failure_gives_the_lineage_up(make):
    stack = make()
    talk = Talk("s")
    first = switched(stack, talk)
    stack.large[0].faults.append(Fault("load_failed"))
    assert talk.turn(stack, model="large")["x-baton-kv-reason"] == "load_failed"
    mine = session(stack)["lineages"]["large-model"]
    assert (mine["kv"], mine["epoch"]) == ("exact", None)
    talk.turn(stack, model="small")
    talk.turn(stack, text="word " * 200, model="small")
    talk.turn(stack, model="large")
    assert lineage(stack) not in (None, first)


def test_a_client_that_leaves_midway_leaves_a_lineage_that_is_right(make):
    stack = make(drift=ALWAYS)
    talk = Talk("s")
    talk.turn(stack, model="small")
    stack.large[0].seconds_per_word = 0.05
    messages = [*talk.messages, {"role": "user", "content": "word " * 60}]
    body = {"model": "large", "messages": messages, "stream": True}
    url = f"{stack.url}/v1/chat/completions"
    with (
        httpx.Client() as client,
        client.stream("POST", url, json=body, headers=talk.headers) as response,
    ):
        next(response.iter_bytes())
    eventually(lambda: session(stack)["turns"] == 2)
    turn = session(stack)["timeline"][1]
    # Half an answer is no basis for an audit.
    assert (turn["kv"], turn["audit"]) == ("applied", "none")
    stack.large[0].seconds_per_word = 0
    assert talk.turn(stack, model="large")["x-baton-kv"] == "continued"
