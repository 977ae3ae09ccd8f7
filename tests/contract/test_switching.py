"""A conversation changes model: lineages, namespaces, headers and books."""

import pytest

from tests.fakes.pages import pages, tokenize
from tests.stack import Stack, Talk, eventually


@pytest.fixture
def stack():
    stack = Stack(policy={"kind": "turns", "escalate_at": 3, "downgrade_at": 5})
    yield stack
    eventually(stack.idle)
    stack.stop()


def last(workers):
    return workers[0].seen[-1].body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", [None, "mine"])
def test_up_and_down(stack, stream, session):
    talk = Talk(session, stream=stream)
    headers = [talk.turn(stack) for _ in range(6)]
    assert [h["x-baton-tier"] for h in headers] == ["small"] * 2 + ["large"] * 2 + ["small"] * 2
    assert [h["x-baton-kv"] for h in headers] == [
        "none", "none", "applied", "continued", "applied", "continued",
    ]  # fmt: skip
    assert len({h["x-baton-session"] for h in headers}) == 1
    session = headers[0]["x-baton-session"]
    up, down = stack.mapper.seen
    assert up["source"] == {"model": "small-model", "extra_key": None, "cache_salt": "default"}
    first, second = up["target"]["extra_key"], down["target"]["extra_key"]
    assert first.startswith(f"lossy:{session}:1-")
    # The way back starts from where the large model's KV is, and ends in a lineage of its own.
    assert down["source"]["model"] == "large-model"
    assert down["source"]["extra_key"] == first
    assert second.startswith(f"lossy:{session}:2-")
    assert int(headers[2]["x-baton-kv-tokens"]) > 100
    assert last(stack.large)["extra_key"] == first
    assert last(stack.small)["extra_key"] == second
    assert stack.metric("baton_switches_total", direction="up", reason="turns_escalated") == 1
    assert stack.metric("baton_switches_total", direction="down", reason="turns_downgraded") == 1
    assert stack.metric(
        "baton_kv_transfer_total", pair="small->large", direction="up", status="applied"
    ) == 1  # fmt: skip
    assert stack.metric("baton_kv_transferred_tokens_total", direction="up") == int(
        headers[2]["x-baton-kv-tokens"]
    )


def test_every_request_has_the_tenants_salt_and_the_workers_model(stack):
    talk = Talk()
    for _ in range(3):
        talk.turn(stack)
    for worker, model in ((stack.small[0], "small-model"), (stack.large[0], "large-model")):
        for seen in worker.seen:
            assert seen.body["cache_salt"] == "default"
            assert seen.body["model"] == model
            assert seen.body["stream_options"] == {"include_usage": True}


def test_the_same_lineage_is_used_again_when_coming_back(stack):
    talk = Talk("s")
    for model in ("small", "large", "small", "large"):
        headers = talk.turn(stack, model=model)
    assert headers["x-baton-kv"] == "applied"
    keys = [request["target"]["extra_key"] for request in stack.mapper.seen]
    assert keys[0] == keys[2] != keys[1]


def test_exact_first(stack):
    # Another session has prefilled the very same conversation on the large model.
    one, other = Talk("one"), Talk("other")
    one.turn(stack, model="small")
    other.messages = list(one.messages)
    question = "and now the same question again"
    other.turn(stack, text=question, model="large")
    one.messages = other.messages[:2]
    transfers = len(stack.mapper.seen)
    one.messages.append(other.messages[2])
    raw = stack.client().chat.completions.with_raw_response.create(
        model="large", messages=one.messages, extra_headers=one.headers
    )
    assert len(stack.mapper.seen) == transfers + 1
    assert raw.headers["x-baton-kv"] == "exact"
    assert last(stack.large).get("extra_key") is None
    # What was a prefix hit anyway is not booked as saved.
    assert stack.metric("baton_kv_transferred_tokens_total") == 0
    assert stack.metric("baton_prefill_seconds_saved_total") == 0


def test_no_transfer_is_asked_for_without_a_change_of_model(stack):
    talk = Talk()
    for _ in range(2):
        talk.turn(stack)
    talk = Talk()
    for _ in range(3):
        talk.turn(stack, model="large")
    assert not stack.mapper.seen


def test_lossy_pages_are_out_of_reach_for_everybody_else(stack):
    talk = Talk("s")
    talk.turn(stack, model="small")
    talk.turn(stack, model="large")
    exact = ("large-model", None, "default")
    extra_key = last(stack.large)["extra_key"]
    lossy = ("large-model", extra_key, "default")
    assert stack.store.namespaces[lossy]
    # The same conversation in another session, and one that asks for the namespace itself.
    body = {"model": "large", "messages": talk.messages[:3], "extra_key": extra_key}
    answer = stack.post({**body, "cache_salt": "default"}, {"x-session-id": "other"})
    assert answer.status_code == 200
    assert last(stack.large).get("extra_key") is None
    assert not answer.json()["usage"]["prompt_tokens_details"]
    assert not stack.store.namespaces[exact] & stack.store.namespaces[lossy] - exact_pages(talk)


def exact_pages(talk):
    return set(pages(tokenize(talk.messages[:3])))


def test_unsupported_pair(stack):
    stack.mapper.answer = {
        "status": "unsupported", "reason": "rope_differs", "field": "rope.theta", "ms": 0.1,
        "pair": "small->large", "pages": 0, "tokens": 0, "exact_tokens": 0, "mapped_tokens": 0,
        "reused_tokens": 0,
    }  # fmt: skip
    talk = Talk()
    talk.turn(stack, model="small")
    assert talk.turn(stack, model="large")["x-baton-kv"] == "unsupported"
    assert last(stack.large).get("extra_key") is None
    assert stack.metric("baton_kv_transfer_total", status="unsupported", reason="rope_differs") == 1


def test_a_policy_may_want_native_prefill():
    stack = Stack(policy={"kind": "turns", "escalate_at": 2, "kv": "native"})
    try:
        talk = Talk()
        talk.turn(stack)
        assert talk.turn(stack)["x-baton-kv"] == "native"
        assert not stack.mapper.seen
        assert stack.metric("baton_kv_transfer_total", status="native", reason="policy") == 1
    finally:
        stack.stop()


def test_hybrid_asks_for_a_longer_native_tail():
    stack = Stack(policy={"kind": "turns", "escalate_at": 2, "kv": "hybrid"})
    try:
        talk = Talk()
        for _ in range(2):
            talk.turn(stack)
        assert stack.mapper.seen[0]["native_tail"] == 256
    finally:
        stack.stop()


def test_without_a_mapper_everything_is_native():
    stack = Stack(mapper=False)
    try:
        talk = Talk()
        talk.turn(stack, model="small")
        assert talk.turn(stack, model="large")["x-baton-kv"] == "native"
        assert stack.metric("baton_kv_transfer_total", reason="no_mapper") == 1
    finally:
        stack.stop()


def learn(stack, worker):
    """Native prefills of several lengths, so that the worker's prefill model can predict."""
    for size in (60, 240, 120, 400, 180, 300):
        Talk().turn(stack, text="word " * size, model="large")
    assert stack.gateway.books.model("large-0").ready


def test_saved_seconds_are_predicted_prefill_less_the_transfer(stack):
    stack.large[0].seconds_per_token = 0.001
    learn(stack, stack.large[0])
    talk = Talk()
    talk.turn(stack, text="word " * 300, model="small")
    tokens = int(talk.turn(stack, model="large")["x-baton-kv-tokens"])
    saved = stack.metric("baton_prefill_seconds_saved_total", basis="estimated", direction="up")
    transfer = stack.metric("baton_kv_transfer_seconds_sum")
    assert tokens >= 300
    assert 0.6 < (saved + transfer) / (tokens * 0.001) < 1.6
    assert stack.metric("baton_prefill_seconds_lost_total") == 0


def test_a_transfer_slower_than_the_prefill_is_booked_as_lost(stack):
    stack.large[0].seconds_per_token = 0.0005
    learn(stack, stack.large[0])
    stack.mapper.delay = 1.0
    talk = Talk()
    talk.turn(stack, model="small")
    assert talk.turn(stack, model="large")["x-baton-kv"] == "applied"
    lost = stack.metric("baton_prefill_seconds_lost_total", direction="up")
    assert 0.5 < lost / stack.mapper.delay < 1.2
    assert stack.metric("baton_prefill_seconds_saved_total") == 0


def test_what_the_worker_does_not_confirm_is_not_booked(stack):
    stack.large[0].seconds_per_token = 0.001
    learn(stack, stack.large[0])
    talk = Talk()
    talk.turn(stack, model="small")
    # The mapper says that it is there, and the worker finds nothing.
    stack.mapper.answer = {
        "status": "applied", "reason": "ok", "pair": "small->large", "pages": 9, "tokens": 36,
        "exact_tokens": 0, "mapped_tokens": 36, "reused_tokens": 0, "ms": 1.0, "field": None,
    }  # fmt: skip
    assert talk.turn(stack, model="large")["x-baton-kv"] == "applied"
    assert stack.metric("baton_transfers_unconfirmed_total") == 1
    assert stack.metric("baton_kv_transferred_tokens_total") == 0
    assert stack.metric("baton_prefill_seconds_saved_total") == 0


# Sessions without a name


def test_a_regenerated_answer_starts_a_branch(stack):
    talk = Talk()
    first = talk.turn(stack, model="small")
    before = list(talk.messages)
    second = talk.turn(stack, model="large")
    assert second["x-baton-session"] == first["x-baton-session"]
    question = talk.messages[2]["content"]
    again = Talk()
    again.messages = before
    messages = [*before, {"role": "user", "content": question}]
    branch = stack.post({"model": "large", "messages": messages, "max_tokens": 3})
    assert branch.headers["x-baton-session"] != first["x-baton-session"]
    # The branch does not see its parent's mapped KV; what is exact it shares.
    assert f":{first['x-baton-session']}:" not in (last(stack.large).get("extra_key") or "")
    # The first conversation goes on as if nothing had been.
    assert talk.turn(stack, model="large")["x-baton-session"] == first["x-baton-session"]


def test_an_edited_message_starts_a_branch_that_reuses_the_exact_prefix(stack):
    talk = Talk()
    first = talk.turn(stack, model="small")
    before = list(talk.messages)
    talk.turn(stack, model="small")
    edited = [*before, {"role": "user", "content": "something else entirely, please"}]
    answer = stack.post({"model": "small", "messages": edited})
    assert answer.headers["x-baton-session"] != first["x-baton-session"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50


def test_two_people_who_say_the_same(stack):
    one, other = Talk(), Talk()
    other.messages, one.messages = [], []
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    answers = [stack.post(body) for _ in range(2)]
    sessions = {answer.headers["x-baton-session"] for answer in answers}
    assert len(sessions) == 2
    history = [*body["messages"], answers[0].json()["choices"][0]["message"]]
    next_turns = [
        stack.post({"model": "small", "messages": [*history, {"role": "user", "content": text}]})
        for text in ("one thing", "another thing")
    ]
    assert len({answer.headers["x-baton-session"] for answer in next_turns}) == 2


def test_history_that_began_elsewhere_is_as_old_as_it_says(stack):
    history = []
    for number in range(3):
        history += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    body = {"model": "auto", "messages": [*history, {"role": "user", "content": "next"}]}
    assert stack.post(body).headers["x-baton-reason"] == "turns_escalated"


@pytest.mark.parametrize(
    "named",
    [
        {"headers": {"x-session-id": "mine"}},
        {"body": {"metadata": {"session_id": "mine", "other": "kept"}}},
        {"body": {"prompt_cache_key": "mine"}},
    ],
)
def test_names_of_a_session(stack, named):
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    answer = stack.post({**body, **named.get("body", {})}, named.get("headers"))
    assert answer.headers["x-baton-session"] == "mine"
    sent = last(stack.small)
    assert "prompt_cache_key" not in sent
    assert "session_id" not in sent.get("metadata", {})
    if "metadata" in named.get("body", {}):
        assert sent["metadata"] == {"other": "kept"}
