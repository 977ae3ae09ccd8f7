"""What all tests share."""

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.fixture
def make_stack():
    """Builds a stack; at the end of the test nothing may be left running in its gateway."""
    from tests.stack import Stack, eventually

    made = []

    def make(**options):
        made.append(Stack(**options))
        return made[-1]

    yield make
    try:
        for stack in made:
            if stack.front.thread.is_alive():
                eventually(stack.idle)
    finally:
        for stack in made:
            stack.stop()


@pytest.fixture
def redis_server():
    """One that a test may stop, freeze and fill."""
    from tests.redis_server import RedisServer

    server = RedisServer().start()
    yield server
    server.close()
