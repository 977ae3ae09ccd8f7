"""What a policy is told, and what is learned for it: lengths, paces, prices, spending, cards."""

import asyncio
import json
import time
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Spent
from router.auth.keys import OPEN
from router.budgets.base import seconds_left
from router.budgets.memory import MemoryLedger
from router.budgets.prices import cost
from router.budgets.redis import RedisLedger
from router.metrics import Metrics
from router.relay import sse
from router.relay.logprobs import Confidence, Strip
from router.relay.parser import Answer, Usage
from router.routing import facts
from router.routing.length import PromptLength, held_tokens, mappable_tokens
from router.savings.pace import DecodeModel, TransferModel
from router.sessions.base import Session
from router.sessions.identity import Identity
from router.sessions.lineage import Lineage
from router.settings import Price, Transfers
from router.transfer.pairs import Pairs, by_class
from router.turns.incoming import Incoming, Subject


def incoming(messages, **body):
    body = {"model": "auto", "messages": messages, **body}
    return Incoming("/v1/chat/completions", body, {}, OPEN, "r", time.monotonic())


def said(role, text):
    return {"role": role, "content": text}


# Facts


def test_facts_of_a_turn():
    messages = [said("system", "s" * 10)]
    for number in range(5):
        messages += [said("user", f"question {number}"), said("assistant", "a")]
    messages += [{"role": "user", "content": [{"type": "text", "text": "the last"}]}]
    asked = incoming(messages, tools=[{"type": "function"}], max_tokens=7)
    turn = facts.turn(Subject(asked, Identity("s", None, None)), "large", 99, None)
    assert (turn.number, turn.messages, turn.prompt_tokens, turn.max_tokens) == (6, 12, 99, 7)
    assert turn.text == "the last"
    assert turn.earlier == ("question 4", "question 3", "question 2")
    assert turn.has_tools and not turn.tool_loop and turn.forced == "large"
    assert "question" not in repr(turn)


@pytest.mark.parametrize("messages", [[], [said("system", "x")], [said("tool", "result")]])
def test_facts_without_a_question(messages):
    turn = facts.turn(Subject(incoming(messages), Identity("s", None, None)), None, 0, None)
    assert (turn.text, turn.earlier, turn.prompt_tokens) == ("", (), None)
    assert turn.tool_loop is bool(messages and messages[-1]["role"] == "tool")


# Lengths


def session(model="small", **held):
    lineages = {name: Lineage(exact=tokens) for name, tokens in held.items()}
    return Session(id="s", model=model, tier="small", lineages=lineages)


def test_lengths_are_learned():
    length = PromptLength()
    rate = 0.4
    for size in (100, 400, 900, 2000, 300, 50, 700):
        length.observe(incoming([said("user", "x" * size)]), round(rate * size) + 6)
    found = length.estimate(incoming([said("user", "x" * 1000)]), None)
    assert 0.9 < found / (rate * 1000) < 1.1


def test_what_the_last_model_holds_is_known():
    length = PromptLength()
    talk = [said("user", "x" * 9000), said("assistant", "y" * 9000), said("user", "z" * 40)]
    assert length.estimate(incoming(talk), session(small=500)) == 500 + 10 + 6


@given(st.lists(st.text(max_size=50), max_size=5), st.integers(0, 10**6))
def test_lengths_are_never_negative(texts, tokens):
    length = PromptLength()
    asked = incoming([said("user", text) for text in texts])
    length.observe(asked, tokens)
    assert length.estimate(asked, None) >= 0
    assert length.estimate(asked, session(small=tokens)) >= 0


def test_what_a_transfer_could_take_over():
    settings = Transfers(native_tail=10, min_mapped_tokens=50)
    both = session(small=1000, large=200)
    assert mappable_tokens(settings, both, "large", 2000) == 800
    assert mappable_tokens(settings, both, "large", 1000) == 790
    assert mappable_tokens(settings, both, "large", 240) == 0
    assert mappable_tokens(settings, session(small=100), "large", 500) == 100
    assert mappable_tokens(settings, Session(id="s"), "large", 500) == 0
    assert held_tokens(None, "small") == held_tokens(both, "nosuch") == 0


# Paces


def test_decode_pace_is_the_median_of_the_last():
    model = DecodeModel()
    assert model.predict() is None
    for seconds in (0.9, 1.1, 1.0, 30.0):
        model.observe(101, seconds)
    assert 0.009 < model.predict() < 0.012
    before = model.predict()
    model.observe(2, 50.0)
    assert model.predict() == before


def test_transfer_pace_and_share():
    model = TransferModel()
    assert model.share() == 1.0 and model.predict(100) is None
    for tokens in (200, 400, 1000, 3000):
        model.observe(tokens, tokens, 0.05 + 0.0001 * tokens)
    assert abs(model.predict(2000) - 0.25) < 1e-6
    for _ in range(4):
        model.observe(500, 0, 2.0)
    assert model.share() == 0.5
    assert abs(model.predict(2000) - 0.25) < 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.floats(0, 60)), max_size=80)
)
def test_transfer_pace_is_sane_whatever_it_sees(seen):
    model = TransferModel()
    for expected, tokens, seconds in seen:
        model.observe(expected, tokens, seconds)
    assert 0 <= model.share() <= 1
    assert model.predict(1000) is None or model.predict(1000) >= 0


# Prices and spending


def test_costs():
    price = Price(prompt=10, cached=1, completion=20)
    usage = Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=600)
    spent = cost("large", price, usage)
    assert spent.money == pytest.approx((400 * 10 + 600 * 1 + 100 * 20) / 1e6)
    assert spent.large_tokens == 1100
    assert cost("small", price, usage).large_tokens == 0
    assert cost("large", None, usage) == Spent(large_tokens=1100)
    assert cost("small", Price(prompt=10, completion=0), usage).money == pytest.approx(0.01)
    # A worker that reports more cached tokens than there are earns nothing.
    odd = Usage(prompt_tokens=10, completion_tokens=0, cached_tokens=50)
    assert cost("large", price, odd).money >= 0


async def _spend(ledger):
    assert await ledger.spent("a") == Spent()
    await ledger.add("a", Spent(money=0.25, large_tokens=3))
    await ledger.add("a", Spent(money=0.5, large_tokens=0))
    assert await ledger.spent("a") == Spent(money=0.75, large_tokens=3)
    assert await ledger.spent("b") == Spent()


@pytest.fixture
def clock(monkeypatch):
    day = ["20260101"]
    for module in ("memory", "redis"):
        monkeypatch.setattr(f"router.budgets.{module}.today", lambda: day[0])
    return day


async def test_spending_in_memory(clock):
    ledger = MemoryLedger()
    await _spend(ledger)
    clock[0] = "20260102"
    assert await ledger.spent("a") == Spent()


async def test_spending_in_redis_is_seen_by_all_gateways(redis_server, clock):
    ledgers = [RedisLedger(redis_server.url, None, 1.0, Metrics()) for _ in range(2)]
    await _spend(ledgers[0])
    assert await ledgers[1].spent("a") == Spent(money=0.75, large_tokens=3)
    clock[0] = "20260102"
    assert await ledgers[1].spent("a") == Spent()
    # Each adds to its own.
    await asyncio.gather(*[ledger.add("a", Spent(money=1, large_tokens=1)) for ledger in ledgers])
    assert await ledgers[0].spent("a") == Spent(money=2, large_tokens=2)
    keys = redis_server.client().keys("baton:*:spend:*")
    assert keys and all(0 < redis_server.client().ttl(key) <= 2 * 24 * 3600 for key in keys)
    for ledger in ledgers:
        await ledger.close()


async def test_without_redis_spending_goes_on_and_is_added_later(redis_server, monkeypatch):
    monkeypatch.setattr("router.redis_pool._PAUSE_SECONDS", 0.0)
    metrics = Metrics()
    ledger = RedisLedger(redis_server.url, None, 5.0, metrics)
    await ledger.add("c", Spent(money=1, large_tokens=10))
    assert await ledger.spent("c") == Spent(money=1, large_tokens=10)
    redis_server.stop()
    await ledger.add("c", Spent(money=2, large_tokens=20))
    assert await ledger.spent("c") == Spent(money=3, large_tokens=30)
    redis_server.start()
    await ledger.add("c", Spent(money=4, large_tokens=40))
    other = RedisLedger(redis_server.url, None, 1.0, metrics)
    assert await other.spent("c") == Spent(money=7, large_tokens=70)
    assert await ledger.spent("c") == Spent(money=7, large_tokens=70)
    await asyncio.gather(ledger.close(), other.close())


def test_a_day_has_an_end():
    assert 1 <= seconds_left() <= 24 * 3600


# Confidence


def entry(logprob, *top):
    return {"token": "x", "logprob": logprob, "top_logprobs": [{"logprob": one} for one in top]}


def test_confidence():
    found = Confidence()
    found.read({"content": [entry(-0.1, -0.1, -2.1), entry(-3.0, -0.5, -3.0), entry(-1.0)]})
    assert found.logprobs == [-0.1, -3.0, -1.0]
    assert found.margins == pytest.approx([2.0, 0.0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.just("x"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["content", "logprob", "top_logprobs", "choices", "logprobs", "usage"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_confidence_survives_whatever_it_is_fed(value):
    found = Confidence()
    found.read(value)
    assert all(isinstance(one, float) for one in found.logprobs + found.margins)


@given(JSON, st.sampled_from([None, 0, 1]))
def test_stripping_survives_whatever_a_worker_sends(value, top):
    chunk = value if isinstance(value, dict) else {"choices": value}
    strip = Strip(top)
    event = strip.event(b"data: " + orjson.dumps(chunk) + b"\n\n")
    assert sse.data(event) is not None
    Answer().read_event(event)
    strip.whole(orjson.dumps(chunk))


def test_nothing_else_changes():
    choice = {"index": 0, "delta": {"content": "é", "other": [1, None]}, "finish_reason": None}
    chunk = {"id": "1", "choices": [{**choice, "logprobs": {"content": [entry(-1.0)]}}], "x": {}}
    event = Strip(None).event(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert orjson.loads(sse.data(event)) == {**chunk, "choices": [{**choice, "logprobs": None}]}


def test_what_to_strip():
    assert Strip.of({}) == Strip(None, False)
    assert Strip.of({"logprobs": True}) == Strip(0, False)
    every = {"stream_options": {"continuous_usage_stats": True}}
    assert Strip.of({"logprobs": True, "top_logprobs": 3, **every}) == Strip(3, True)


# Quality cards


def test_retention_by_class():
    kept = {"quote": 0.7, "chat": 1.2, "math": -0.1, "code": None, "other": 0.5}
    assert by_class({"retention": kept}) == {"quote": 0.7, "chat": 1.0, "math": 0.0}
    assert by_class({"retention": {"quote": float("nan")}}) == {}
    assert by_class({}) == by_class({"retention": 3}) == {}


async def test_pairs():
    answers = [
        [{"source": "s", "target": "l", "status": "ready", "artifact": "maps/up", "quality": None}],
        [{"source": 3}],
    ]

    async def ask(timeout):
        return answers.pop(0)

    pairs = Pairs(SimpleNamespace(pairs=ask))
    assert pairs.ready("s", "l") and pairs.ready("l", "s")
    await pairs.refresh()
    assert pairs.ready("s", "l") and not pairs.ready("l", "s")
    # What cannot be understood changes nothing.
    await pairs.refresh()
    assert pairs.ready("s", "l")
    assert pairs.retention("s", "l") == pairs.retention(None, "l") == {}
