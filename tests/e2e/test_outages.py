"""Each real part gone in the middle of a session: the turn is answered, and the reason is told."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e.talk import SHARED, Conversation, metric

pytestmark = pytest.mark.e2e


@pytest.fixture
def talk(real_stack, document, request):
    talk = Conversation(real_stack, f"{request.node.name}. {document[:2500]}")
    talk.turn("When was the line opened?", "small")
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


def _wait_ready(stack):
    for _ in range(300):
        if httpx.get(stack.config.url("gateway") + "/ready", timeout=30).json()["missing"] == []:
            return
        time.sleep(0.1)
    raise AssertionError("the gateway has not found all its parts again")
