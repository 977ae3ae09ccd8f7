"""Calls to a Redis that is away fail at once, for a while."""

import pytest
from redis.exceptions import RedisError

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
