"""The stream splitter and the tolerant parser."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.relay import sse
from router.relay.parser import Answer, Kind
from router.relay.sse import EventTooLarge, Splitter

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.text(
    alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1
).map(lambda text: b"data: " + text.encode())


@st.composite
def streams(draw):
    """Events, and a way to cut their bytes into pieces."""
    events = draw(
        st.lists(
            st.tuples(st.lists(LINES, min_size=1, max_size=3), ENDS).map(
                lambda event: event[1].join(event[0]) + event[1] + event[1]
            ),
            max_size=6,
        )
    )
    whole = b"".join(events) + draw(st.sampled_from([b"", b"data: half", b"\n"]))
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=10).map(sorted))
    return events, [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]


@given(streams())
def test_no_byte_is_lost_and_events_are_whole(stream):
    events, pieces = stream
    splitter = Splitter()
    found = [event for piece in pieces for event in splitter.feed(piece)]
    assert b"".join(found) + splitter.rest == b"".join(pieces)
    # Where the stream is cut makes no difference to the events.
    assert [sse.data(event) for event in found] == [
        sse.data(event) for event in Splitter().feed(b"".join(pieces))
    ]
    # A line end in CR may still become CRLF, so that the last event may have to wait.
    assert len(events) - len(found) in (0, 1) or b"\r" in b"".join(pieces)


@given(st.binary(max_size=300), st.integers(1, 7))
def test_any_bytes_at_all(data, size):
    splitter, answer = Splitter(), Answer()
    found = []
    for start in range(0, len(data), size):
        for event in splitter.feed(data[start : start + size]):
            answer.read_event(event)
            found.append(event)
    assert b"".join(found) + splitter.rest == data


def test_a_character_cut_in_two():
    event = 'data: {"choices":[{"delta":{"content":"„é漢🙂"}}]}\n\n'.encode()
    splitter, answer = Splitter(), Answer()
    for byte in event:
        for whole in splitter.feed(bytes([byte])):
            answer.read_event(whole)
    assert answer.choices[0].message()["content"] == "„é漢🙂"


def test_an_endless_event_is_an_error():
    splitter = Splitter(limit=100)
    with pytest.raises(EventTooLarge):
        for _ in range(20):
            splitter.feed(b"data: xxxxxxxxxx")


def test_data_of_several_lines():
    assert sse.data(b"data: a\r\ndata:b\ndata\n\n") == b"a\nb\n"
    assert sse.data(b": comment\n\n") is None
    assert sse.data(b"event: x\nid: 1\n\n") is None


def read(*chunks):
    answer = Answer()
    kinds = [answer.read_event(b"data: " + json.dumps(c).encode() + b"\n\n") for c in chunks]
    return answer, kinds


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "index", "usage", "error", "tool_calls", "function", "content",
             "finish_reason", "prompt_tokens_details", "prompt_tokens", "message", "name"]
        ),
        inner, max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.lists(JSON, max_size=5))
def test_the_parser_survives_whatever_it_is_fed(chunks):
    answer, _ = read(*chunks)
    [choice.message() for choice in answer.choices.values()]
    for chunk in chunks:
        Answer().read_body(json.dumps(chunk).encode())


def test_usage():
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    answer, kinds = read({"choices": [], "usage": usage})
    assert kinds == [Kind.USAGE]
    assert answer.usage.cached_tokens is None
    answer, _ = read({"choices": [], "usage": {**usage, "prompt_tokens_details": None}})
    assert answer.usage.cached_tokens is None
    details = {"prompt_tokens_details": {"cached_tokens": 5}}
    answer, _ = read({"choices": [], "usage": {**usage, **details}})
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (7, 5)


def test_usage_beside_content_is_content():
    chunk = {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}}
    answer, kinds = read(chunk)
    assert kinds == [Kind.CONTENT]
    assert answer.usage.prompt_tokens == 1


def test_tool_calls_grow_by_index():
    def call(index, **function):
        delta = {"tool_calls": [{"index": index, "function": function}]}
        return {"choices": [{"index": 0, "delta": delta}]}

    answer, _ = read(
        call(0, name="a", arguments=""), call(1, name="b", arguments="{"),
        call(0, arguments="{}"), call(1, arguments="}"),
    )  # fmt: skip
    calls = answer.choices[0].message()["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("a", "{}"),
        ("b", "{}"),
    ]


def test_done_error_and_garbage():
    answer = Answer()
    assert answer.read_event(b"data: [DONE]\n\n") is Kind.DONE
    assert answer.done
    assert answer.read_event(b'data: {"error": {"message": "x"}}\n\n') is Kind.ERROR
    assert answer.read_event(b"data: {\n\n") is Kind.GARBAGE
    assert answer.read_event(b": ping\n\n") is Kind.OTHER
