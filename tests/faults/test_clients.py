"""What a client can do wrong: leave, dawdle, send too much."""

import json
import socket
import threading
import time

import httpx
import pytest

from tests.fakes.faults import Fault
from tests.stack import eventually, user

BODY = {"model": "small", "messages": [user()], "stream": True}


def connect(stack):
    connection = socket.create_connection(("127.0.0.1", stack.front.port), timeout=10)
    return connection


def request(body, path="/v1/chat/completions"):
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def read_all(connection):
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


@pytest.mark.parametrize("stream", [False, True])
def test_gone_before_the_first_token(stack, stream):
    worker = stack.small[0]
    worker.faults.append(Fault("hang"))
    connection = connect(stack)
    connection.sendall(request({**BODY, "stream": stream}))
    eventually(lambda: worker.active)
    connection.close()
    eventually(lambda: worker.seen[0].aborted)
    eventually(lambda: stack.metric("baton_requests_total", status="499") == 1)
    assert stack.metric("baton_requests_total", status="500") == 0


def test_gone_mid_stream_is_499_and_its_usage_is_recorded(stack):
    worker = stack.small[0]
    worker.faults.append(Fault("stall", after=4))
    connection = connect(stack)
    connection.sendall(request(BODY))
    assert b"200" in connection.recv(15)
    eventually(lambda: worker.active)
    while b"you" not in connection.recv(65536):
        pass
    connection.close()
    eventually(lambda: worker.seen[0].aborted)
    eventually(lambda: stack.metric("baton_requests_total", status="499") == 1)
    # The worker never came to its usage chunk, so the gateway counts for itself.
    counted = stack.metric("baton_tokens_total", kind="prompt", basis="counted")
    assert counted > len(user()["content"].split())
    assert stack.metric("baton_tokens_total", kind="completion", basis="counted") == 3
    assert stack.metric("baton_tokens_total", basis="reported") == 0


def test_a_client_that_leaves_does_not_trip_the_breaker(stack):
    worker = stack.small[0]
    for number in range(7):
        worker.faults.append(Fault("hang"))
        connection = connect(stack)
        connection.sendall(request(BODY))
        eventually(lambda number=number: len(worker.seen) == number + 1 and worker.active)
        connection.close()
        eventually(lambda: not worker.active)
    assert stack.metric("baton_worker_breaker_state", worker="small-0") == 0


def test_gone_while_waiting_in_the_queue(make_stack):
    stack = make_stack(limits={"concurrency_per_tier": 1})
    worker = stack.small[0]
    worker.faults.append(Fault("hang"))
    first, second = connect(stack), connect(stack)
    first.sendall(request(BODY))
    eventually(lambda: worker.active)
    second.sendall(request(BODY))
    eventually(lambda: stack.gateway.gates["small"].queued == 1)
    second.close()
    eventually(lambda: stack.gateway.gates["small"].queued == 0)
    first.close()
    eventually(lambda: stack.gateway.gates["small"].in_flight == 0)
    assert len(worker.seen) == 1


def test_slow_loris_headers(make_stack):
    stack = make_stack(timeouts={"headers_seconds": 0.5})
    with connect(stack) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        stop = threading.Event()

        def drip():
            while not stop.wait(0.1):
                try:
                    connection.sendall(b"x-drip: 1\r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        answer = read_all_safely(connection)
        stop.set()
        dripping.join()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"error"' in answer


def test_a_connection_that_says_nothing_is_closed(make_stack):
    stack = make_stack(timeouts={"headers_seconds": 0.3})
    with connect(stack) as connection:
        assert read_all_safely(connection).startswith(b"HTTP/1.1 408")


def test_slow_loris_after_a_good_request(make_stack):
    stack = make_stack(timeouts={"headers_seconds": 0.4})
    with connect(stack) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert read_all_safely(connection).startswith(b"HTTP/1.1 408")


def test_slow_loris_body(make_stack):
    stack = make_stack(timeouts={"body_seconds": 0.4})
    whole = request(BODY)
    with connect(stack) as connection:
        connection.sendall(whole[:-20])
        for _ in range(3):
            time.sleep(0.1)
            connection.sendall(whole[-20:-19])
        answer = read_all_safely(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert not stack.small[0].seen
    assert stack.metric("baton_rejected_total", reason="slow_body") == 1


def test_a_slow_answer_is_no_slow_request(make_stack):
    stack = make_stack(timeouts={"headers_seconds": 0.3, "body_seconds": 0.3})
    stack.small[0].faults.append(Fault("hang", seconds=1.0))
    assert stack.stream(BODY).status_code == 200


def test_a_client_that_reads_nothing_loses_its_stream(make_stack):
    stack = make_stack(timeouts={"client_write_seconds": 0.4})
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60000 + b'"}}]}\n\n'
    stack.small[0].raw = [piece] * 400
    with connect(stack) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request(BODY))
        eventually(lambda: stack.metric("baton_requests_total", status="499") == 1)
        eventually(stack.idle)


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body(make_stack, chunked):
    stack = make_stack(limits={"body_bytes": 2000})
    body = json.dumps({**BODY, "messages": [user("x" * 3000)]}).encode()
    content = iter([body[:1500], body[1500:]]) if chunked else body
    response = httpx.post(
        f"{stack.url}/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert not stack.small[0].seen


def test_oversized_headers(make_stack):
    stack = make_stack(limits={"header_bytes": 2000})
    response = httpx.get(f"{stack.url}/v1/models", headers={"x-large": "x" * 3000})
    assert response.status_code == 431
    assert response.json()["error"]["message"]
    answer = httpx.get(f"{stack.url}/v1/models", headers={"x-large": "x" * 9000})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


def test_not_http_at_all(stack):
    with connect(stack) as connection:
        connection.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
        answer = read_all_safely(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer


def read_all_safely(connection):
    try:
        return read_all(connection)
    except ConnectionResetError:
        return b""
