"""What unit tests share."""

import pytest


@pytest.fixture(scope="module")
def redis_server():
    """One for a file: its tests leave it running, and do not mind what others have written."""
    from tests.redis_server import RedisServer

    server = RedisServer().start()
    yield server
    server.close()
