"""Cascades: the small tier answers first, and its confidence decides whether that is the answer."""

import json

import pytest

from tests.fakes.faults import Fault
from tests.stack import Talk, eventually, user

BODY = {"model": "auto", "messages": [user("word " * 60)]}
LOW = {"below": {"low_logprob": -1.0}}


def policy(**cascade):
    return {"kind": "adaptive", "threshold": 1.0, "cascade": {**LOW, **cascade}}


@pytest.fixture(params=["early", "buffer"])
def mode(request):
    return request.param


@pytest.fixture
def stack(make_stack, mode):
    return make_stack(
        policy=policy(mode=mode, tokens=4),
        prices={
            "small": {"prompt": 1, "completion": 2},
            "large": {"prompt": 10, "cached": 1, "completion": 20},
        },
    )


def text(response, stream):
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    chunks = [
        json.loads(event.removeprefix("data: "))
        for event in response.text.split("\n\n")
        if event and event != "data: [DONE]"
    ]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_confident_answer_is_kept(stack, stream):
    answer = stack.post({**BODY, "stream": stream})
    assert answer.headers["x-baton-cascade"] == "kept"
    assert answer.headers["x-baton-tier"] == "small"
    assert "you said" in text(answer, stream)
    assert not stack.large[0].seen
    asked = stack.small[0].seen[-1].body
    assert asked["logprobs"] is True and asked["top_logprobs"] == 2
    assert stack.metric("baton_cascade_total", outcome="kept", reason="confident") == 1
    assert stack.metric("baton_cascade_hold_seconds_count", outcome="kept") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_did_not_ask_for_is_stripped(stack, stream):
    answer = stack.post({**BODY, "stream": stream})
    assert '"logprob"' not in answer.text
    if stream:
        assert answer.text.count('"total_tokens"') == 0
        assert answer.text.endswith("data: [DONE]\n\n")
        usage = stack.post({**BODY, "stream": True, "stream_options": {"include_usage": True}})
        assert usage.text.count('"total_tokens"') == 1
    else:
        assert answer.json()["choices"][0]["logprobs"] is None
        assert answer.json()["usage"]["prompt_tokens"] > 60


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wanted", "alternatives"), [(0, 0), (1, 1), (5, 5)])
def test_what_the_client_asked_for_stays(stack, stream, wanted, alternatives):
    answer = stack.post({**BODY, "stream": stream, "logprobs": True, "top_logprobs": wanted})
    assert stack.small[0].seen[-1].body["top_logprobs"] == max(2, wanted)
    if not stream:
        entry = answer.json()["choices"][0]["logprobs"]["content"][0]
        assert entry["logprob"] == -0.5
        assert len(entry["top_logprobs"]) == alternatives
    else:
        assert '"logprob":-0.5' in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsure_answer_is_given_by_the_large_tier(stack, stream):
    stack.small[0].logprob = -3.0
    body = {**BODY, "stream": stream}
    answer = stack.post(body, {"x-session-id": "s"})
    assert answer.headers["x-baton-cascade"] == "escalated"
    assert answer.headers["x-baton-tier"] == "large"
    assert answer.headers["x-baton-reason"] == "cascade_low_logprob"
    # The small tier has just read the prompt: its KV is mapped at once.
    assert answer.headers["x-baton-kv"] == "applied"
    assert int(answer.headers["x-baton-kv-tokens"]) > 50
    (transfer,) = stack.mapper.seen
    assert transfer["source"]["model"] == "small-model"
    assert stack.large[0].seen[-1].body["extra_key"] == transfer["target"]["extra_key"]
    assert "logprobs" not in stack.large[0].seen[-1].body
    assert "you said" in text(answer, stream)
    assert stack.metric("baton_cascade_total", outcome="escalated", reason="low_logprob") == 1
    # Of the small tier's part the conversation keeps the prompt, and not the answer.
    state = _session(stack, "s")
    assert state.lineage("small-model").exact == state.timeline[-1].prompt_tokens
    assert (state.timeline[-1].tier, len(state.timeline)) == ("large", 1)
    assert state.prompt_tokens == 2 * state.timeline[-1].prompt_tokens
    # Both tiers' tokens are counted, and both are paid for.
    for tier in ("small", "large"):
        assert stack.metric("baton_tokens_total", tier=tier, kind="prompt") > 60
        assert stack.metric("baton_money_total", tier=tier) > 0
    # The session goes on at the large tier, on the KV that it now has there.
    follow = {
        **body,
        "messages": [*BODY["messages"], {"role": "assistant", "content": "x"}, user()],
    }
    after = stack.post({**follow, "model": "large"}, {"x-session-id": "s"})
    assert after.headers["x-baton-kv"] == "continued"


def test_pages_that_are_still_being_written_are_waited_for(make_stack):
    stack = make_stack(policy=policy(mode="early", tokens=2), transfers={"min_mapped_tokens": 10})
    stack.small[0].logprob = -3.0
    stack.mapper.early = 2
    body = {**BODY, "messages": [user("word " * 100)]}
    assert stack.post({**body, "stream": True}).headers["x-baton-kv"] == "applied"
    assert len(stack.mapper.seen) == 3
    # There is nothing to wait for at any other change of model, or for a short prompt.
    talk = Talk("s")
    talk.turn(stack, model="small")
    stack.mapper.early = 1
    assert talk.turn(stack, model="large")["x-baton-kv"] == "fallback_reprefill"
    stack.mapper.early = 1
    assert stack.post({**BODY, "messages": [user("short")]}).headers["x-baton-kv"] != "applied"
    assert len(stack.mapper.seen) == 5


def test_an_early_decision_ends_the_small_answer(make_stack):
    stack = make_stack(policy=policy(mode="early", tokens=2))
    stack.small[0].logprob = -3.0
    stack.small[0].seconds_per_word = 0.3
    answer = stack.post({**BODY, "stream": True})
    assert answer.headers["x-baton-tier"] == "large"
    eventually(lambda: stack.small[0].seen[-1].aborted)
    assert not stack.small[0].seen[-1].finished


def test_an_early_decision_to_keep_streams_on(make_stack):
    stack = make_stack(policy=policy(mode="early", tokens=2))
    stack.small[0].logprob = -0.5
    plain = stack.post({**BODY, "model": "small", "stream": True})
    judged = stack.post({**BODY, "stream": True})
    assert text(judged, True) == text(plain, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["status", "garbage", "error_first"])
def test_a_small_tier_that_fails_is_passed_over(make_stack, mode, stream, kind):
    stack = make_stack(policy=policy(mode=mode), retries={"attempts": 1})
    stack.small[0].faults.append(Fault(kind))
    answer = stack.post({**BODY, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-baton-cascade"] == "unanswered"
    assert answer.headers["x-baton-reason"] == "cascade_unanswered"
    assert "you said" in text(answer, stream)


@pytest.mark.parametrize("kind", ["die", "garbage_midway", "error_midway", "silent_end"])
def test_a_small_answer_that_breaks_off_is_given_by_the_large_tier(make_stack, mode, kind):
    stack = make_stack(policy=policy(mode=mode, tokens=8))
    stack.small[0].faults.append(Fault(kind, after=3))
    answer = stack.post({**BODY, "stream": True})
    assert answer.headers["x-baton-cascade"] == "unanswered"
    assert answer.headers["x-baton-tier"] == "large"
    assert "error" not in answer.text and answer.text.endswith("data: [DONE]\n\n")


def test_a_bad_request_is_not_escalated(stack):
    stack.small[0].faults.append(Fault("status", status=400, text="too long"))
    answer = stack.post(BODY)
    assert answer.status_code == 400
    assert not stack.large[0].seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_tier_that_fails_leaves_the_small_answer(make_stack, stream):
    stack = make_stack(policy=policy(mode="buffer"), retries={"attempts": 1})
    stack.small[0].logprob = -3.0
    stack.large[0].faults.append(Fault("status"))
    answer = stack.post({**BODY, "stream": stream}, {"x-session-id": "s"})
    assert answer.status_code == 200
    assert answer.headers["x-baton-tier"] == "small"
    assert answer.headers["x-baton-cascade"] == "rescued"
    assert answer.headers["x-baton-reason"] == "escalation_failed"
    assert "you said" in text(answer, stream)
    assert '"logprob"' not in answer.text
    assert len(stack.small[0].seen) == 1
    assert _session(stack, "s").tier == "small"


def test_a_large_tier_that_fails_after_an_early_decision(make_stack):
    stack = make_stack(policy=policy(mode="early", tokens=2), retries={"attempts": 1})
    stack.small[0].logprob = -3.0
    stack.small[0].seconds_per_word = 0.05
    stack.large[0].faults.append(Fault("status"))
    answer = stack.post({**BODY, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["x-baton-tier"] == "small"
    assert answer.headers["x-baton-reason"] == "fail_open"
    assert "you said" in text(answer, True)


def test_no_second_tier_where_the_policy_says_none(make_stack):
    stack = make_stack(
        policy={**policy(mode="early", tokens=2), "fail_open": "none"}, retries={"attempts": 1}
    )
    stack.small[0].logprob = -3.0
    stack.small[0].seconds_per_word = 0.05
    stack.large[0].faults.append(Fault("status"))
    assert stack.post({**BODY, "stream": True}).status_code == 500


@pytest.mark.parametrize("body", [{"n": 2}, {"model": "small"}, {"model": "large"}])
def test_turns_that_cannot_be_taken_back_are_relayed(stack, body):
    answer = stack.post({**BODY, **body})
    assert "x-baton-cascade" not in answer.headers
    assert "logprobs" not in (stack.small[0].seen or stack.large[0].seen)[-1].body


def test_a_client_that_leaves_while_it_is_judged(make_stack):
    stack = make_stack(policy=policy(mode="buffer"))
    stack.small[0].seconds_per_word = 0.2
    client = stack.client(timeout=0.5)
    with pytest.raises(Exception, match="timed out"):
        client.chat.completions.create(**BODY)
    eventually(stack.idle)
    assert stack.metric("baton_tokens_total", tier="small", kind="prompt") >= 0


@pytest.mark.parametrize(("yes", "tier"), [(0.9, "small"), (0.1, "large")])
def test_the_small_model_is_asked_what_it_thinks_of_its_answer(make_stack, yes, tier):
    stack = make_stack(
        policy={
            "kind": "adaptive",
            "threshold": 1.0,
            "cascade": {"mode": "buffer", "self_check": True, "below": {"self_check": 0.5}},
        }
    )
    stack.small[0].opinion = {"Yes": yes, " no": 1 - yes}
    answer = stack.post(BODY)
    assert answer.headers["x-baton-tier"] == tier
    check = stack.small[0].seen[1].body
    assert check["messages"][-2]["role"] == "assistant" and check["max_tokens"] == 1
    assert check["cache_salt"] == "default"


def test_a_session_on_the_large_tier_and_back(make_stack):
    stack = make_stack(policy=policy(mode="buffer"))
    talk = Talk("s")
    stack.small[0].logprob = -3.0
    assert talk.turn(stack)["x-baton-tier"] == "large"
    stack.small[0].logprob = -0.5
    back = talk.turn(stack)
    state = _session(stack, "s")
    assert state.turns == 2
    assert state.switches_up == 0
    assert (back["x-baton-tier"], state.tier, state.stay) == ("small", "small", 1)
    assert state.spent.large_tokens > 60


def _session(stack, id):
    import asyncio

    call = stack.gateway.store.get("default", id)
    return asyncio.run_coroutine_threadsafe(call, stack.server._loop).result(5)
