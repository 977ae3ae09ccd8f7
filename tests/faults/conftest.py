"""Builds gateways to break."""

import pytest


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
def stack(make_stack):
    return make_stack()
