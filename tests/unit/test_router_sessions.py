"""Session stores, and the digest that finds a conversation again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.metrics import Metrics
from router.sessions import identity, lineage, record
from router.sessions.base import Session, TurnRecord
from router.sessions.memory import MemoryStore
from router.sessions.redis import RedisStore
from router.transfer.outcome import Outcome
from router.transfer.plan import new_epoch


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


# What the lineage needs of a store


async def test_an_amendment_makes_no_session(store):
    assert await store.amend("t", "s", turned) is None
    assert await store.get("t", "s") is None
    await store.update("t", "s", turned, [])
    assert (await store.amend("t", "s", turned)).turns == 2


async def test_each_change_is_a_revision_and_each_session_is_born_once(store):
    first = await store.update("t", "s", turned, [])
    second = await store.amend("t", "s", turned)
    assert (first.revision, second.revision) == (1, 2)
    assert first.born and first.born == second.born
    assert second.updated >= first.updated > 0
    await store.delete("t", "s")
    assert (await store.update("t", "s", turned, [])).born != first.born


async def test_recent_sessions_by_tenant_latest_first(store):
    for id in ("a", "b", "c", "é/ "):
        await store.update("t", id, turned, [])
    await store.update("other", "x", turned, [])
    await store.update("t", "a", turned, [])
    ids = [id for id, _ in await store.recent("t", 10)]
    assert ids == ["a", "é/ ", "c", "b"]
    page = await store.recent("t", 2)
    assert [id for id, _ in await store.recent("t", 2, page[-1][1])] == ["c", "b"]
    await store.delete("t", "c")
    assert "c" not in [id for id, _ in await store.recent("t", 10)]
    assert [id for id, _ in await store.recent("other", 10)] == ["x"]


async def test_expired_sessions_leave_the_index(redis_server):
    redis_server.client().flushall()
    short = RedisStore(redis_server.url, None, 1, 2.0, Metrics())
    await short.update("t", "old", turned, [])
    await asyncio.sleep(1.1)
    await short.update("t", "new", turned, [])
    assert [id for id, _ in await short.recent("t", 10)] == ["new"]
    await short.close()


async def test_two_gateways_and_many_turns_of_one_session_at_once(redis_server):
    """Turns begin on what they read, and end on what others have written since."""
    redis_server.client().flushall()
    gateways = [RedisStore(redis_server.url, None, 60, 5.0, Metrics()) for _ in range(2)]
    begun, given_up = [], set()

    async def turn(number):
        store = gateways[number % 2]
        session = await store.get("t", "s")
        epoch = (session and session.lineage("m").epoch) or new_epoch(session or Session(id="s"))
        exact = number % 5 == 4
        if not exact:
            begun.append(epoch)
        outcome = Outcome("none", "x") if exact else Outcome("applied", "x", epoch=epoch)
        await asyncio.sleep(0.002 * (number % 3))
        entry = TurnRecord(
            number=0, at=float(number), tier="large", model="m", kv="x", kv_reason="x",
            epoch=outcome.epoch, prompt_tokens=10, completion_tokens=1, drift_expected=0.1,
        )  # fmt: skip

        def change(now):
            now.turns += 1
            record.advance(now, entry, outcome, session.born if session else "")

        session = await store.update("t", "s", change, [])
        if not exact and number % 3 == 0:
            found = record.Measurement((0.2,))

            def audited(now):
                record.audit(now, entry, found, 11, "measured", session.born)

            await gateways[(number + 1) % 2].amend("t", "s", audited)
            given_up.add(epoch)
            after = await store.get("t", "s")
            assert after.lineage("m").epoch not in given_up

    await turn(1)
    for first in range(2, 62, 12):
        await asyncio.gather(*(turn(number) for number in range(first, first + 12)))
    session = await gateways[0].get("t", "s")
    audits = len([n for n in range(2, 62) if n % 5 != 4 and n % 3 == 0])
    assert session.turns == 61
    assert session.revision == 61 + audits
    assert session.drift["up"].turns == audits
    assert [turn.number for turn in session.timeline] == list(range(1, 62))
    assert session.epoch == max(lineage.ordinal(epoch) for epoch in begun)
    mine = session.lineage("m")
    assert mine.epoch is None or lineage.ordinal(mine.epoch) > mine.retired
    for store in gateways:
        await store.close()
