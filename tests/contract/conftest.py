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


@pytest.fixture
def make(tmp_path):
    """Builds gateways that audit; at the end nothing may be left running in them."""
    from tests.contract.lossy import ALWAYS, KEY
    from tests.stack import Stack, eventually

    made = []

    def build(drift=ALWAYS, **settings):
        key = tmp_path / "admin.key"
        key.write_text(KEY["authorization"].removeprefix("Bearer "))
        made.append(Stack(drift=drift, auth={"admin_key_file": str(key)}, **settings))
        return made[-1]

    yield build
    for stack in made:
        eventually(stack.idle)
        stack.stop()
