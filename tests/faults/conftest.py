"""A gateway to break."""

import pytest


@pytest.fixture
def stack(make_stack):
    return make_stack()
