"""Gives the suite a gateway."""

import pytest


@pytest.fixture(scope="module")
def stack():
    from tests.stack import Stack

    stack = Stack()
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def base_url(stack):
    return f"{stack.url}/v1"
