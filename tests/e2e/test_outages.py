"""Each real part gone in the middle of a session: the turn is answered, and the reason is told."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e.talk import SHARED, Conversation, lineage, metric, session

pytestmark = pytest.mark.e2e


@pytest.fixture
def talk(real_stack, document, request):
    talk = Conversation(real_stack, f"{request.node.name}. {document[:2500]}")
    talk.turn("When was the line opened?", "small")
    talk.settle()
    return talk


def test_without_the_mapper_a_switch_is_native(real_stack, talk):
    real_stack.stop_part("mapper")
    try:
        reply = talk.turn("Which engine was first?", "large")
    finally:
        real_stack.start_mapper()
        _wait_ready(real_stack)
    assert reply.text
    assert (reply.headers["x-baton-kv"], reply.headers["x-baton-kv-reason"]) == (
        "native",
        "mapper_unreachable",
    )
    assert reply.cached_tokens <= SHARED
    assert (
        metric(real_stack, "gateway", "baton_kv_transfer_total", reason="mapper_unreachable") >= 1
    )


def test_without_redis_turns_are_answered(real_stack, talk):
    real_stack.stop_part("redis")
    try:
        reply = talk.turn("Which engine was first?", "large")
    finally:
        real_stack.start_redis()
        _wait_ready(real_stack)
    assert reply.text and reply.headers["x-baton-kv"] == "native"
    assert reply.headers["x-baton-kv-reason"] == "session_store_down"


def test_a_worker_that_restarts_with_an_empty_pool_restores_from_the_store(real_stack, talk):
    applied = talk.turn("Which engine was first?", "large")
    assert applied.headers["x-baton-kv"] == "applied"
    real_stack.stop_part("large")
    real_stack.start_worker("large").wait_ready()
    _wait_ready(real_stack)
    reply = talk.turn("Who drove it?", "large")
    assert reply.text
    assert reply.headers["x-baton-kv"] == "continued"
    assert reply.cached_tokens >= applied.cached_tokens
    # The gateway has seen the worker go, and the turn since has confirmed its lineage.
    mine = session(real_stack, talk.session)["lineages"][real_stack.config.worker("large").name]
    assert (mine["kv"], mine["confirmed"]) == ("lossy", True)


def test_a_gateway_that_is_killed_goes_on_with_the_same_lineage(real_stack, talk):
    applied = talk.turn("Which engine was first?", "large")
    assert applied.headers["x-baton-kv"] == "applied", applied.headers["x-baton-kv-reason"]
    before = lineage(real_stack, talk.session)
    assert before is not None
    real_stack.processes["gateway"].kill()
    real_stack.processes.pop("gateway").wait()
    real_stack.start_gateway()
    _wait_ready(real_stack)
    reply = talk.turn("Who drove it?", "large")
    assert reply.headers["x-baton-kv"] == "continued"
    assert lineage(real_stack, talk.session) == before
    assert session(real_stack, talk.session)["turns"] == 3


def test_a_redis_that_is_killed_and_empty_begins_another_lineage(real_stack, talk):
    applied = talk.turn("Which engine was first?", "large")
    assert applied.headers["x-baton-kv"] == "applied", applied.headers["x-baton-kv-reason"]
    before = lineage(real_stack, talk.session)
    real_stack.processes["redis"].kill()
    real_stack.processes.pop("redis").wait()
    real_stack.start_redis()
    _wait_ready(real_stack)
    # Nothing is known of the session any more: the turn runs on exact KV, whatever there is.
    reply = talk.turn("Who drove it?", "large")
    assert reply.headers["x-baton-kv"] == "none"
    assert reply.cached_tokens <= SHARED
    assert lineage(real_stack, talk.session) is None
    talk.messages[-1]["content"] += " Go on. " * 120
    talk.turn("And the smallest?", "small")
    talk.turn("Thank you.", "large")
    assert lineage(real_stack, talk.session) != before


def test_a_mapper_that_is_killed_costs_one_native_turn(real_stack, talk):
    real_stack.processes["mapper"].kill()
    real_stack.processes.pop("mapper").wait()
    try:
        reply = talk.turn("Which engine was first?", "large")
    finally:
        real_stack.start_mapper()
        _wait_ready(real_stack)
    assert reply.text and reply.headers["x-baton-kv"] == "native"
    after = talk.turn("Who drove it?", "large")
    assert (after.headers["x-baton-kv"], lineage(real_stack, talk.session)) == ("none", None)


def _wait_ready(stack):
    for _ in range(300):
        if httpx.get(stack.config.url("gateway") + "/ready", timeout=30).json()["missing"] == []:
            return
        time.sleep(0.1)
    raise AssertionError("the gateway has not found all its parts again")
