"""Redis, the mapper, the clock and the disk go wrong; every turn is answered all the same."""

import errno
import os
import time

import httpx
import pytest

from router.auth import keys
from tests.fakes.faults import Fault
from tests.fakes.server import Threaded
from tests.stack import Talk, eventually, user

# Redis


def test_redis_gone_and_back(make_stack, redis_server):
    stack = make_stack(redis_url=redis_server.url, policy={"kind": "turns", "escalate_at": 3})
    talk = Talk("s1")
    assert talk.turn(stack)["x-baton-kv"] == "none"
    redis_server.stop()
    # Without state the turn is counted from the history that the client sends.
    second = talk.turn(stack)
    assert second["x-baton-kv"] == "native"
    assert second["x-baton-tier"] == "small"
    third = talk.turn(stack)
    assert third["x-baton-tier"] == "large"
    assert third["x-baton-kv"] == "native"
    assert stack.small[0].seen[-1].body.get("extra_key") is None
    assert stack.metric("baton_kv_transfer_total", reason="session_store_down") == 2
    assert stack.metric("baton_session_store_up") == 0
    ready = httpx.get(f"{stack.url}/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "degraded"
    assert ready.json()["missing"] == ["session store"]
    assert stack.metric("baton_session_store_errors_total") > 0
    redis_server.start()
    eventually(lambda: stack.metric("baton_session_store_up") == 1)
    # The state of the first turn is still there, and so it goes on from the second.
    assert talk.turn(stack)["x-baton-kv"] == "none"
    assert talk.turn(stack, model="large")["x-baton-kv"] == "applied"


def test_a_redis_that_hangs_costs_its_timeout_once(make_stack, redis_server, monkeypatch):
    monkeypatch.setattr("router.redis_pool._PAUSE_SECONDS", 600.0)
    stack = make_stack(redis_url=redis_server.url, timeouts={"store_seconds": 0.4})
    Talk("s1").turn(stack)
    redis_server.freeze()
    for _ in range(4):
        assert Talk("s1").turn(stack)["x-baton-kv"] == "native"
    # One call for sessions and one for spending; a look at the store may be under way as well.
    assert 2 <= stack.metric("baton_session_store_errors_total") <= 3
    redis_server.freeze(False)
    stack.gateway.store._fail_fast._until = 0.0
    eventually(lambda: stack.metric("baton_session_store_up") == 1)
    assert Talk("s1").turn(stack)["x-baton-kv"] == "none"


def test_start_without_redis_is_degraded(make_stack, redis_server):
    redis_server.stop()
    stack = make_stack(redis_url=redis_server.url)
    assert httpx.get(f"{stack.url}/ready").json()["status"] == "degraded"
    assert Talk("s1").turn(stack)["x-baton-kv"] == "native"
    redis_server.start()
    eventually(lambda: httpx.get(f"{stack.url}/ready").json()["status"] == "ready")
    assert Talk().turn(stack)["x-baton-kv"] == "none"


def test_a_full_redis_is_a_redis_that_is_down(make_stack, redis_server):
    stack = make_stack(redis_url=redis_server.url)
    talk = Talk("s1")
    talk.turn(stack)
    redis_server.client().config_set("maxmemory", "1")
    for _ in range(2):
        talk.turn(stack)
    assert stack.metric("baton_session_store_errors_total", operation="update") >= 1
    redis_server.client().config_set("maxmemory", "0")
    eventually(lambda: not stack.gateway.store._fail_fast.paused)
    assert talk.turn(stack)["x-baton-kv"] == "none"


def test_the_rate_limit_lets_everybody_in_without_redis(make_stack, redis_server):
    stack = make_stack(redis_url=redis_server.url, limits={"requests_per_tenant": "2/minute"})
    for _ in range(2):
        Talk().turn(stack)
    refused = stack.post({"model": "auto", "messages": [user()]})
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    redis_server.stop()
    assert Talk("s1").turn(stack)["x-baton-kv"] == "native"


def test_several_gateways_share_sessions_and_rates(make_stack, redis_server):
    options = {"redis_url": redis_server.url, "limits": {"requests_per_tenant": "5/minute"}}
    one = make_stack(**options)
    two = make_stack(**options)
    two.small[0].store = one.store
    talk = Talk()
    first = talk.turn(one)
    second = talk.turn(two)
    assert first["x-baton-session"] == second["x-baton-session"]
    third = talk.turn(one)
    assert third["x-baton-tier"] == "large"
    assert third["x-baton-session"] == first["x-baton-session"]
    for stack in (one, two):
        talk.turn(stack)
    assert two.post({"model": "auto", "messages": [user()]}).status_code == 429


# The mapper


def switch(stack, talk=None):
    talk = talk or Talk()
    talk.turn(stack, model="small")
    return talk.turn(stack, model="large")


def test_mapper_gone_and_back(make_stack):
    stack = make_stack(pool={"health_seconds": 0.2, "breaker_seconds": 2.0})
    port = stack.servers["mapper"].port
    stack.servers["mapper"].stop()
    headers = switch(stack)
    assert headers["x-baton-kv"] == "native"
    assert headers["x-baton-kv-tokens"] == "0"
    assert stack.large[0].seen[-1].body.get("extra_key") is None
    assert (
        stack.metric("baton_kv_transfer_total", status="native", reason="mapper_unreachable") == 1
    )
    assert httpx.get(f"{stack.url}/ready").json()["missing"] == ["mapper"]
    # Once it has failed often enough nobody waits for it any more, until it is back.
    eventually(lambda: switch(stack)["x-baton-kv-reason"] == "mapper_breaker_open", 60)
    stack.servers["mapper"] = Threaded(stack.mapper.app(), port=port).start()
    eventually(lambda: switch(stack)["x-baton-kv"] == "applied", 60)


@pytest.mark.parametrize(
    ("fault", "reason"), [("status", "mapper_error"), ("garbage", "mapper_invalid")]
)
def test_mapper_answers_nonsense(stack, fault, reason):
    stack.mapper.fault = fault
    assert switch(stack)["x-baton-kv"] == "native"
    assert stack.metric("baton_kv_transfer_total", status="native", reason=reason) == 1


def test_a_late_mapper_is_not_waited_for(make_stack):
    stack = make_stack(transfers={"deadline_ms": 200})
    stack.mapper.delay = 5.0
    started = time.monotonic()
    headers = switch(stack)
    assert time.monotonic() - started < stack.mapper.delay / 2
    assert headers["x-baton-kv"] == "native"
    assert stack.large[0].seen[-1].body.get("extra_key") is None
    assert stack.metric("baton_kv_transfer_total", status="native", reason="deadline") == 1


def test_tokenizing_fails(stack, monkeypatch):
    talk = Talk()
    talk.turn(stack, model="small")
    worker = next(w for w in stack.gateway.pool.workers if w.tier == "large")

    async def broken(body, timeout):
        raise httpx.ReadTimeout("scripted")

    monkeypatch.setattr(worker, "tokenize", broken)
    assert talk.turn(stack, model="large")["x-baton-kv"] == "native"
    assert stack.metric("baton_kv_transfer_total", reason="tokenize_failed") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_that_cannot_be_loaded_is_retried_natively(stack, stream):
    talk = Talk(stream=stream)
    talk.turn(stack, model="small")
    stack.large[0].faults.append(Fault("load_failed"))
    headers = talk.turn(stack, model="large")
    assert headers["x-baton-kv"] == "native"
    assert headers["x-baton-kv-tokens"] == "0"
    first, second = stack.large[0].seen
    assert first.body["extra_key"].startswith("lossy:")
    assert second.body.get("extra_key") is None
    assert stack.metric("baton_kv_transfer_total", status="native", reason="load_failed") == 1
    assert stack.metric("baton_prefill_seconds_saved_total") == 0
    assert stack.metric("baton_worker_breaker_state", worker="large-0") == 0
    # The session goes on from exact KV.
    assert talk.turn(stack, model="large")["x-baton-kv"] == "none"


def test_a_load_failure_on_a_later_turn_of_the_lineage(stack):
    talk = Talk()
    switch(stack, talk)
    stack.large[0].faults.append(Fault("load_failed"))
    assert talk.turn(stack, model="large")["x-baton-kv"] == "native"
    assert stack.large[0].seen[-1].body.get("extra_key") is None


def test_a_load_failure_that_does_not_end_is_an_error(stack):
    stack.small[0].faults.extend([Fault("load_failed")] * 3)
    response = stack.post({"model": "small", "messages": [user()]})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


# The clock and the disk


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0])
def test_a_step_of_the_clock_changes_nothing(stack, monkeypatch, step):
    talk = Talk()
    talk.turn(stack)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert talk.turn(stack)["x-baton-kv"] == "none"
    assert talk.turn(stack)["x-baton-kv"] == "applied"
    assert stack.metric("baton_worker_up") == 2
    assert stack.metric("baton_worker_breaker_state") == 0
    assert stack.metric("baton_time_to_first_token_seconds_sum") < 10


def test_a_full_disk_leaves_the_old_keys(tmp_path, monkeypatch):
    path = tmp_path / "keys.yaml"
    keys.create(path, "one")
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        keys.create(path, "two")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if "lock" not in p.name] == ["keys.yaml"]


def test_a_full_page_store_is_answered_natively(stack):
    stack.mapper.answer = {
        "status": "fallback_reprefill", "reason": "store_full", "pair": "small->large",
        "pages": 0, "tokens": 0, "exact_tokens": 0, "mapped_tokens": 0, "reused_tokens": 0,
        "ms": 0.1, "field": None,
    }  # fmt: skip
    headers = switch(stack)
    assert headers["x-baton-kv"] == "fallback_reprefill"
    assert stack.large[0].seen[-1].body.get("extra_key") is None
    assert stack.metric("baton_kv_transfer_total", reason="store_full") == 1
