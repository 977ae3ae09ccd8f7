"""Session stores, and the digest that finds a conversation again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.metrics import Metrics
from router.sessions import identity
from router.sessions.memory import MemoryStore
from router.sessions.redis import RedisStore


@pytest.fixture(scope="module")
def redis_server():
    from tests.redis_server import RedisServer

    server = RedisServer().start()
    yield server
    server.close()


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    if request.param == "memory":
        yield MemoryStore(60)
        return
    server = request.getfixturevalue("redis_server")
    server.client().flushall()
    store = RedisStore(server.url, None, 60, 2.0, Metrics())
    yield store
    await store.close()


def turned(session):
    session.turns += 1


async def test_a_session_is_kept(store):
    assert await store.get("t", "s") is None
    await store.update("t", "s", turned, [])
    assert (await store.get("t", "s")).turns == 1
    assert await store.delete("t", "s")
    assert not await store.delete("t", "s")


async def test_updates_at_once_are_all_counted(store):
    await asyncio.gather(*(store.update("t", "s", turned, []) for _ in range(8)))
    assert (await store.get("t", "s")).turns == 8


async def test_tenants_are_apart(store):
    await store.update("one", "s", turned, ["digest"])
    assert await store.get("two", "s") is None
    assert await store.find("two", "digest") is None
    assert await store.find("one", "digest") == "s"
    # Names that run together are still apart.
    await store.update("ab", "c", turned, [])
    assert await store.get("a", "bc") is None


async def test_any_printable_id(store):
    for id in ("漢字", "a b", "x:y:z", "*", "\u00e9" * 256):
        await store.update("t", id, turned, [])
        assert (await store.get("t", id)).id == id


async def test_redis_forgets_after_the_ttl(redis_server):
    store = RedisStore(redis_server.url, None, 77, 2.0, Metrics())
    await store.update("t", "ttl", turned, ["d"])
    client = redis_server.client()
    assert all(0 < client.ttl(key) <= 77 for key in client.keys("baton:*") if client.ttl(key) < 78)
    await store.close()


async def test_a_session_that_cannot_be_read_is_a_new_one(redis_server):
    from router.sessions.redis import _session_key

    store = RedisStore(redis_server.url, None, 60, 2.0, Metrics())
    client = redis_server.client()
    for bad in (b"{", b'{"id": 5}', b'{"id": "s", "version": 999}'):
        client.set(_session_key("t", "s"), bad)
        assert await store.get("t", "s") is None
        assert (await store.update("t", "s", turned, [])).turns == 1
    await store.close()


async def test_memory_forgets_after_the_ttl():
    store = MemoryStore(-1)
    await store.update("t", "s", turned, ["d"])
    assert await store.get("t", "s") is None
    assert await store.find("t", "d") is None


# Identity

MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=10)}
)


@given(st.lists(MESSAGE, max_size=5), st.lists(MESSAGE, max_size=3))
def test_digests_chain(start, more):
    whole = identity.conversation([*start, *more])
    assert identity.conversation(more, identity.conversation(start)) == whole


@given(st.lists(MESSAGE, min_size=1, max_size=5), st.lists(MESSAGE, min_size=1, max_size=5))
def test_different_conversations_differ(one, other):
    assert (identity.conversation(one) == identity.conversation(other)) == (one == other)


def test_what_clients_do_to_an_answer_does_not_matter():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ours = {"role": "assistant", "content": "", "tool_calls": [call]}
    theirs = {
        "role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [],
        "tool_calls": [{**call, "index": 0}], "function_call": None,
    }  # fmt: skip
    assert identity.conversation([ours]) == identity.conversation([theirs])
    text = {"role": "user", "content": "ab"}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert identity.conversation([text]) == identity.conversation([parts])


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({"x-session-id": "h"}, {"metadata": {"session_id": "m"}, "prompt_cache_key": "p"}, "h"),
        ({}, {"metadata": {"session_id": "m"}, "prompt_cache_key": "p"}, "m"),
        ({}, {"metadata": {"other": 1}, "prompt_cache_key": "p"}, "p"),
        ({}, {"metadata": None}, None),
        ({"x-session-id": ""}, {}, None),
    ],
)
def test_order_of_names(headers, body, name):
    assert identity.named(headers, body) == name


@pytest.mark.parametrize("bad", ["x" * 257, "line\nend", "nul\0"])
def test_bad_names(bad):
    with pytest.raises(ApiError):
        identity.named({"x-session-id": bad}, {})
    with pytest.raises(ApiError):
        identity.named({}, {"metadata": {"session_id": 5}})
