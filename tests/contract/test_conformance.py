"""Rows of the conformance list that concern the proxy itself: headers, fields, shapes, limits."""

import asyncio
import itertools
import json

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.faults import Fault
from tests.stack import Stack, eventually, user

BODY = {"model": "small", "messages": [user()]}
URL = "/v1/chat/completions"


def last(stack):
    return stack.small[0].seen[-1]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model": NaN}', b"{}",
     b'{"model": "small"}', b'{"messages": [{"role": "user", "content": "x"}]}',
     b'{"model": 1, "messages": []}', b'{"model": "small", "messages": {}}',
     b'{"model": "small", "messages": [1]}', b'{"model": null, "messages": null}',
     b'{"model": "small", "messages": [{"role": "user", "content": 5}]}',
     b'{"model": "small", "messages": [{"role": "user", "content": "\\ud800"}]}',
     b'{"model": "small", "x": ' + b"[" * 400 + b"]" * 400 + b"}",
     b"[" * 100_000],
)  # fmt: skip
def test_malformed_bodies_touch_no_worker(stack, raw):
    before = len(stack.small[0].seen)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{stack.url}{URL}", content=raw, headers=headers)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(stack.small[0].seen) == before


def test_missing_model_is_named(stack):
    answer = stack.post({"messages": [user()]})
    assert answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["code"] == "missing_required_parameter"


def test_other_content_types_are_refused(stack):
    for kind in ("text/plain", "multipart/form-data; boundary=x"):
        answer = httpx.post(f"{stack.url}{URL}", content=b"x", headers={"content-type": kind})
        assert answer.status_code == 415
        assert answer.json()["error"]["type"] == "invalid_request_error"
    with_charset = {"content-type": "Application/JSON; charset=utf-8"}
    answer = httpx.post(f"{stack.url}{URL}", content=json.dumps(BODY), headers=with_charset)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", URL, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_unknown_routes_and_methods(stack, method, path, status):
    answer = httpx.request(method, f"{stack.url}{path}")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


def test_unknown_fields_pass_and_the_gateways_own_do_not(stack):
    own = {
        "extra_key": "lossy:x:1", "cache_salt": "somebody", "priority": 99, "rid": "r",
        "session_params": {"id": "s"}, "custom_logit_processor": "code", "routed_dp_rank": 0,
    }  # fmt: skip
    unknown = {"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"x": 1}, "brand_new": [1, None]}
    assert stack.post({**BODY, **own, **unknown}).status_code == 200
    sent = last(stack).body
    assert sent["cache_salt"] == "default"
    assert not set(own) - {"cache_salt"} & set(sent)
    assert {name: sent[name] for name in unknown} == unknown


def test_the_body_is_otherwise_untouched(stack):
    body = {**BODY, "temperature": 0.5, "stop": ["a", "b"], "seed": 3, "stream": False,
            "response_format": {"type": "text"}, "logit_bias": {"5": -1.5}}  # fmt: skip
    stack.post(body)
    assert last(stack).body == {**body, "model": "small-model", "cache_salt": "default"}


def test_stream_options_keep_what_the_client_set(stack):
    options = {"include_usage": False, "continuous_usage_stats": False}
    stack.stream({**BODY, "stream_options": options})
    assert last(stack).body["stream_options"] == {**options, "include_usage": True}


def test_the_clients_credentials_stay_here(stack):
    headers = {
        "authorization": "Bearer secret-of-the-client", "cookie": "secret=cookie",
        "x-api-key": "secret-key", "openai-organization": "secret-org", "x-forwarded-for": "1.2.3.4",
    }  # fmt: skip
    stack.post(BODY, headers)
    assert "secret" not in json.dumps(last(stack).headers)
    assert "authorization" not in last(stack).headers


def test_worker_credentials_are_the_gateways(tmp_path):
    secret = tmp_path / "worker.key"
    secret.write_text("worker-secret\n")
    plain = Stack(large=0, mapper=False)
    worker = {"name": "w", "tier": "small", "url": plain.servers["small-0"].url,
              "model": "small-model", "api_key_file": str(secret)}  # fmt: skip
    stack = Stack(small=0, large=0, mapper=False, extra_workers=[worker])
    try:
        stack.post(BODY, {"authorization": "Bearer mine"})
        assert last(plain).headers["authorization"] == "Bearer worker-secret"
    finally:
        stack.stop()
        plain.stop()


def test_request_id_and_trace_are_forwarded_and_returned(stack):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for stream in (False, True):
        answer = stack.post(
            {**BODY, "stream": stream}, {"x-request-id": "my-id-1", "traceparent": trace}
        )
        assert answer.headers["x-request-id"] == "my-id-1"
        assert answer.headers["traceparent"] == trace
        assert last(stack).headers["x-request-id"] == "my-id-1"
        assert last(stack).headers["traceparent"] == trace


def test_a_bad_request_id_is_replaced(stack):
    answer = stack.post(BODY, {"x-request-id": "x" * 500})
    assert answer.headers["x-request-id"].startswith("req-")
    assert stack.post({}, {}).headers["x-request-id"].startswith("req-")


def test_cors_preflight_without_auth(stack):
    headers = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = httpx.options(f"{stack.url}{URL}", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == headers["origin"]
    # An open gateway on loopback does not talk to just any web site.
    foreign = {**headers, "origin": "https://evil.example"}
    assert httpx.options(f"{stack.url}{URL}", headers=foreign).status_code == 400


def test_streams_are_not_buffered_or_encoded(stack):
    answer = stack.post({**BODY, "stream": True}, {"accept-encoding": "gzip, br"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in answer.headers
    assert last(stack).headers["accept-encoding"] == "identity"


def test_first_events_are_passed_on_at_once(stack):
    stack.small[0].faults.append(Fault("stall", after=3, seconds=1.5))
    client = stack.client()
    stream = client.chat.completions.create(**BODY, stream=True)
    worker = stack.small[0]
    assert next(stream).choices
    # The worker is still in the middle of it.
    assert worker.active == 1
    assert list(stream)[-1].choices[0].finish_reason == "stop"


def test_usage_chunk_with_more_in_it_is_kept(stack):
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}'
    content = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    extended = b'data: {"choices":[],"sglext":{"a":1},' + usage + b"}\n\n"
    plain = b'data: {"choices":[],' + usage + b"}\n\n"
    done = b"data: [DONE]\n\n"
    with_raw(stack, [content, extended, plain, done], content + extended + done)


def with_raw(stack, pieces, expected, **body):
    worker = stack.small[0]
    worker.raw = pieces
    try:
        answer = stack.stream({**BODY, **body})
    finally:
        worker.raw = None
    assert answer.content == expected


TEXT = st.text(max_size=30)
PAYLOAD = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {
                    "index": st.integers(0, 3),
                    "delta": st.fixed_dictionaries({}, optional={"content": TEXT, "role": TEXT}),
                    "finish_reason": st.none(),
                }
            ),
            min_size=1,
            max_size=2,
        )
    },
    optional={"id": TEXT, "anything": st.none() | TEXT | st.lists(st.integers(), max_size=2)},
)


@st.composite
def cut_streams(draw):
    """A valid stream with any line ends and comments, and where it is cut into pieces."""
    whole = b""
    for payload in draw(st.lists(PAYLOAD, min_size=1, max_size=5)):
        end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
        if draw(st.booleans()):
            whole += b": ping" + end + end
        text = json.dumps(payload, ensure_ascii=draw(st.booleans()))
        whole += b"data: " + text.encode("utf-8", "surrogatepass") + end + end
    whole += b"data: [DONE]\n\n"
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=12).map(sorted))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges) if a < b]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=cut_streams(), with_usage=st.booleans())
def test_relayed_stream_is_byte_identical(stack, pieces, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    with_raw(stack, pieces, b"".join(pieces), **options)


def test_admission_limits(make_limited):
    stack = make_limited(concurrency_per_tier=1, queue_per_tier=0)
    worker = stack.small[0]
    worker.faults.append(Fault("stall", after=2, seconds=2))
    with stack.client().chat.completions.create(**BODY, stream=True) as stream:
        next(stream)
        refused = stack.post(BODY)
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert stack.post({**BODY, "model": "large"}).status_code == 200
    eventually(lambda: stack.gateway.gates["small"].in_flight == 0)
    assert stack.post(BODY).status_code == 200
    assert stack.metric("baton_rejected_total", reason="queue_full") == 1


@pytest.fixture
def make_limited():
    made = []

    def make(**limits):
        made.append(Stack(limits=limits))
        return made[-1]

    yield make
    for stack in made:
        stack.stop()


def test_the_official_client_retries_a_429_by_itself(make_limited):
    stack = make_limited(concurrency_per_tier=1, queue_per_tier=0)
    stack.small[0].faults.append(Fault("stall", after=2, seconds=0.5))
    with stack.client().chat.completions.create(**BODY, stream=True) as stream:
        next(stream)
        patient = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=3)
        assert patient.chat.completions.create(**BODY).choices


def test_metrics_have_no_unbounded_labels(stack):
    for number in range(5):
        stack.post({**BODY, "model": f"nosuch{number}"}, {"x-session-id": f"session{number}"})
        httpx.get(f"{stack.url}/nosuch{number}")
    text = httpx.get(f"{stack.url}/metrics").text
    assert "nosuch" not in text
    assert "session0" not in text


def test_openapi_is_published(stack):
    described = httpx.get(f"{stack.url}/openapi.json").json()
    assert URL in described["paths"]
    assert described["components"]["schemas"]["ChatRequest"]["required"]


def test_the_end_of_a_stream_waits_for_the_sessions_state(stack, monkeypatch):
    # A client that sends its next turn as soon as it sees the end must find its session.
    store = stack.gateway.store
    update = store.update

    async def slow(*arguments):
        await asyncio.sleep(0.5)
        return await update(*arguments)

    monkeypatch.setattr(store, "update", slow)
    text = ""
    url = f"{stack.url}{URL}"
    with httpx.stream("POST", url, json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                break
            if line:
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        history = [*BODY["messages"], {"role": "assistant", "content": text}, user("more")]
        follow = stack.post({**BODY, "messages": history})
    assert follow.headers["x-baton-session"] == answer.headers["x-baton-session"]
