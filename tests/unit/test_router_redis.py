"""Connections to Redis are few, and calls to one that is away fail at once, for a while."""

import asyncio

import pytest
from redis.exceptions import RedisError

from router.admission.rate import _CONNECTIONS, RateLimit
from router.errors import ApiError
from router.metrics import Metrics
from router.redis_pool import FailFast, RedisDown


class Calls:
    def __init__(self):
        self.now = 100.0
        self.made = 0
        self.failures = []
        self.fail_fast = FailFast(
            lambda operation, error: self.failures.append((operation, error)), lambda: self.now
        )

    def call(self, operation, error=None):
        with self.fail_fast.call(operation):
            self.made += 1
            if error is not None:
                raise error


@pytest.mark.parametrize("error", [RedisError("no"), ConnectionRefusedError(), TimeoutError()])
def test_after_a_failure_no_call_is_made_for_a_second(error):
    calls = Calls()
    with pytest.raises(RedisDown) as raised:
        calls.call("get", error)
    assert raised.value.__cause__ is error
    calls.now += 0.99
    with pytest.raises(RedisDown):
        calls.call("update")
    # Only what was tried is reported.
    assert calls.made == 1 and calls.failures == [("get", error)]
    calls.now += 0.02
    calls.call("update")
    assert calls.made == 2 and not calls.fail_fast.paused


def test_what_is_not_redis_fault_passes_through_and_begins_no_pause():
    calls = Calls()
    with pytest.raises(ValueError, match="ours"):
        calls.call("get", ValueError("ours"))
    assert not calls.fail_fast.paused and not calls.failures


async def test_a_rate_is_counted_over_few_connections_that_are_closed(redis_server):
    client = redis_server.client()
    client.flushall()
    limit = RateLimit("60/minute", redis_server.url, None, 20.0, Metrics())
    turns = [limit.hit("t") for _ in range(4 * _CONNECTIONS)]
    answers = await asyncio.gather(*turns, return_exceptions=True)
    refused = [one for one in answers if isinstance(one, ApiError)]
    assert len(refused) == 4
    assert 1 < len(client.client_list()) <= 1 + _CONNECTIONS
    await limit.close()
    assert len(client.client_list()) == 1


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1/0"])
async def test_a_rate_without_redis_lets_everybody_in(url):
    metrics = Metrics()
    limit = RateLimit("1/minute", url, None, 1.0, metrics)
    for _ in range(3):
        await limit.hit("t")
    labels = {"operation": "rate"}
    count = metrics.registry.get_sample_value("baton_session_store_errors_total", labels)
    assert count >= 1
    await limit.close()
