"""Makes `tests` importable however pytest is started, and gives the suite a gateway."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def stack():
    from tests.stack import Stack

    stack = Stack()
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def base_url(stack):
    return f"{stack.url}/v1"
