"""What a worker can do wrong, what the client sees of it, and that nothing is left behind."""

import json

import openai
import pytest

from tests.fakes.faults import Fault
from tests.fakes.server import RawServer
from tests.stack import events, eventually, user

BODY = {"model": "small", "messages": [user()]}
FORCED = {"extra_headers": {"x-baton-tier": "small"}}


def ask(stack, stream, **options):
    client = stack.client()
    return client.chat.completions.create(
        model=options.pop("model", "small"), messages=[user()], stream=stream, **options
    )


def text_of(answer, stream):
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    return answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_refused_connection_goes_to_the_other_worker(make_stack, stream):
    stack = make_stack(small=2)
    stack.servers["small-0"].stop()
    for _ in range(4):
        assert text_of(ask(stack, stream), stream)
    assert len(stack.small[1].seen) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_refused_connection_without_another_worker(stack, stream):
    stack.servers["small-0"].stop()
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, stream)
    assert error.value.status_code == 503
    assert error.value.body["type"] == "server_error"
    assert error.value.response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tier_that_is_gone_is_answered_by_the_other(stack, stream):
    stack.servers["small-0"].stop()
    raw = stack.client().chat.completions.with_raw_response.create(
        model="auto", messages=[user()], stream=stream
    )
    assert raw.headers["x-baton-tier"] == "large"
    assert raw.headers["x-baton-reason"] == "fail_open"
    assert text_of(raw.parse(), stream)


def test_fail_open_none_fails(make_stack):
    stack = make_stack(policy={"kind": "turns", "fail_open": "none"})
    stack.servers["small-0"].stop()
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, True, model="auto")
    assert error.value.status_code == 503


def test_hang_before_headers(make_stack):
    stack = make_stack(timeouts={"first_event_seconds": 0.3})
    worker = stack.small[0]
    worker.faults.append(Fault("hang"))
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, True)
    assert error.value.status_code == 504
    eventually(lambda: worker.seen[0].aborted)
    assert stack.metric("baton_worker_requests_total", outcome="timeout") == 1


def test_hang_of_a_whole_answer_ends_with_the_request_timeout(make_stack):
    stack = make_stack(timeouts={"request_seconds": 0.4})
    stack.small[0].faults.append(Fault("hang"))
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, False)
    assert error.value.status_code == 504
    eventually(lambda: stack.small[0].seen[0].aborted)


def test_hang_before_headers_goes_to_the_other_worker(make_stack):
    stack = make_stack(small=2, timeouts={"first_event_seconds": 0.3})
    for worker in stack.small:
        worker.faults.append(Fault("hang"))
    # Whichever worker is first hangs; the other one hangs once too, and then answers.
    for worker in stack.small[1:]:
        worker.faults.clear()
    answers = [text_of(ask(stack, True), True) for _ in range(8)]
    assert all(answers)
    assert sum(seen.aborted for worker in stack.small for seen in worker.seen) <= 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("stall"), "stalled"),
        (Fault("die"), "died"),
        (Fault("silent_end"), "died"),
        (Fault("garbage_midway"), "garbage"),
    ],
)
def test_failure_after_headers_is_a_framed_error_and_no_retry(make_stack, fault, code):
    stack = make_stack(timeouts={"idle_seconds": 0.3})
    stack.small[0].faults.append(fault)
    response = stack.stream(BODY)
    assert response.status_code == 200
    last = events(response.content)[-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert len(stack.small[0].seen) == 1
    stack.small[0].faults.append(fault)
    with pytest.raises(openai.APIError):
        list(ask(stack, True))
    assert stack.metric("baton_worker_requests_total", outcome=code) == 2


def test_stalled_request_is_aborted_at_the_worker(make_stack):
    stack = make_stack(timeouts={"idle_seconds": 0.3})
    stack.small[0].faults.append(Fault("stall"))
    stack.stream(BODY)
    eventually(lambda: stack.small[0].seen[0].aborted)


def test_stream_over_the_request_timeout_is_cut_with_an_error(make_stack):
    stack = make_stack(timeouts={"request_seconds": 0.5})
    stack.small[0].faults.append(Fault("stall"))
    response = stack.stream(BODY)
    assert response.status_code == 200
    assert b"took too long" in events(response.content)[-1]


def test_the_workers_own_error_event_is_relayed_and_is_the_end(stack):
    stack.small[0].faults.append(Fault("error_midway"))
    response = stack.stream(BODY)
    assert b"Out of memory" in events(response.content)[-1]
    with pytest.raises(openai.APIError):
        stack.small[0].faults.append(Fault("error_midway"))
        list(ask(stack, True))


@pytest.mark.parametrize("kind", ["garbage", "garbage_stream", "empty", "error_first"])
def test_failure_before_the_first_token_is_a_real_5xx(stack, kind):
    # Three attempts at most: as many failures as there can be tries.
    stack.small[0].faults.extend([Fault(kind)] * 3)
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, True)
    assert error.value.status_code in (502, 503)
    assert set(error.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", ["garbage", "garbage_stream", "empty", "error_first"])
def test_failure_before_the_first_token_is_hidden_by_another_worker(make_stack, kind):
    stack = make_stack(small=2)
    for worker in stack.small:
        worker.faults.append(Fault(kind))
    session = {"extra_headers": {"x-session-id": "s"}}
    # Both workers fail once in turn; with three attempts one of them is asked again only
    # when the connection itself failed. One failure is always hidden.
    stack.small[1].faults.clear()
    assert all(text_of(ask(stack, True, **session), True) for _ in range(2))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\x01\x02 no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    ],
    ids=["reset", "garbage", "cut", "redirect"],
)
def test_a_worker_that_speaks_no_proper_http(make_stack, stream, answer):
    broken = RawServer(answer)
    worker = {"name": "raw", "tier": "small", "url": broken.url, "model": "small-model"}
    stack = make_stack(small=0, extra_workers=[worker])
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, stream)
    assert error.value.status_code in (502, 503)
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert 1 <= broken.connections <= 3
    broken.stop()


def test_garbage_as_a_whole_answer(stack):
    stack.small[0].faults.append(Fault("garbage"))
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, False)
    assert error.value.status_code == 502


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_status(stack, stream, status):
    stack.small[0].faults.append(Fault("status", status=status))
    with pytest.raises(openai.APIStatusError) as error:
        ask(stack, stream)
    assert error.value.status_code == status
    assert error.value.body["message"] == "scripted failure"
    assert set(error.value.body) == {"message", "type", "param", "code"}
    if status == 429:
        assert error.value.response.headers["retry-after"] == "7"
    assert len(stack.small[0].seen) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_status_is_hidden_by_another_worker(make_stack, status):
    stack = make_stack(small=2)
    stack.small[0].faults.append(Fault("status", status=status))
    assert all(text_of(ask(stack, True), True) for _ in range(8))


@pytest.mark.parametrize("status", [400, 404, 422])
def test_4xx_is_relayed_in_shape_and_does_not_trip_the_breaker(stack, status):
    stack.small[0].faults.extend([Fault("status", status=status)] * 8)
    for _ in range(8):
        with pytest.raises(openai.APIStatusError) as error:
            ask(stack, False)
        assert error.value.status_code == status
        assert error.value.body["type"] == "invalid_request_error"
    assert stack.metric("baton_worker_breaker_state", worker="small-0") == 0
    assert ask(stack, False).choices


def test_the_workers_word_for_a_wrong_parameter_becomes_param(stack):
    text = "[{'type': 'float_type', 'loc': ('body', 'min_p'), 'msg': 'no number'}]"
    stack.small[0].faults.append(Fault("status", status=400, text=text))
    with pytest.raises(openai.BadRequestError) as error:
        ask(stack, False)
    assert error.value.param == "min_p"


def test_refused_credentials_are_the_gateways_fault_and_not_the_clients(stack):
    stack.small[0].faults.append(Fault("status", status=401))
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, False)
    assert error.value.status_code == 502


def test_breaker_opens_and_closes_again(stack):
    worker = stack.small[0]
    worker.faults.extend([Fault("status", status=500)] * 5)
    for _ in range(5):
        with pytest.raises(openai.InternalServerError):
            ask(stack, False)
    assert stack.metric("baton_worker_breaker_state", worker="small-0") == 2
    with pytest.raises(openai.InternalServerError) as error:
        ask(stack, False)
    assert error.value.code == "no_worker"
    assert len(worker.seen) == 5
    eventually(lambda: stack.gateway.pool.workers[0].breaker.state == "half_open")
    assert ask(stack, False).choices
    assert stack.metric("baton_worker_breaker_state", worker="small-0") == 0


def test_an_unhealthy_worker_is_left_out_and_comes_back(make_stack):
    stack = make_stack(small=2)
    stack.small[0].healthy = False
    eventually(lambda: stack.metric("baton_worker_up", worker="small-0") == 0)
    for _ in range(6):
        ask(stack, False)
    assert not stack.small[0].seen
    stack.small[0].healthy = True
    eventually(lambda: stack.metric("baton_worker_up", worker="small-0") == 1)


def test_idle_connections_reset_by_the_worker_are_not_seen(stack):
    for _ in range(3):
        assert ask(stack, False).choices
        # What a worker does whose keep-alive is shorter than ours, at the worst moment.
        for connection in list(stack.servers["small-0"].server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)
    assert stack.metric("baton_requests_total", status="200", route="/v1/chat/completions") == 3


def test_hedging_takes_whoever_is_first_and_aborts_the_other(make_stack):
    stack = make_stack(small=2, retries={"hedge_after_seconds": 0.1})
    for worker in stack.small:
        worker.faults.append(Fault("hang", seconds=20))
    stack.small[1].faults.clear()
    for number in range(6):
        assert text_of(ask(stack, True, extra_headers={"x-session-id": f"s{number}"}), True)
    hung = [seen for seen in stack.small[0].seen if not seen.finished]
    assert len(hung) == 1
    eventually(lambda: hung[0].aborted)
    assert stack.metric("baton_worker_hedges_total", winner="second") == 1


def test_one_session_stays_on_one_worker(make_stack):
    stack = make_stack(small=3)
    for number in range(3):
        for _ in range(4):
            ask(stack, False, extra_headers={"x-session-id": f"s{number}"})
    for worker in stack.small:
        assert len(worker.seen) % 4 == 0


def test_gauges_are_right_before_anybody_reads_them(stack):
    """Of several processes only one is asked for the metrics of all."""
    value = stack.gateway.metrics.registry.get_sample_value
    labels = {"worker": "small-0", "tier": "small"}
    eventually(lambda: value("baton_worker_up", labels) == 1)
    stack.small[0].healthy = False
    eventually(lambda: value("baton_worker_up", labels) == 0)
