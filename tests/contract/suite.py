"""What the official client must be able to do. Needs a fixture `base_url` of a gateway.

Runs against scripted workers and against real ones: nothing here knows which.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Say hello to the world, please, in a few words."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_answer(client):
    answer = client.chat.completions.create(model="auto", messages=ASK, max_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_without_usage(client):
    chunks = list(
        client.chat.completions.create(model="auto", messages=ASK, max_tokens=8, stream=True)
    )
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("asked", [True, False])
def test_usage_chunk_only_when_asked(client, asked):
    chunks = list(
        client.chat.completions.create(
            model="auto", messages=ASK, max_tokens=8, stream=True,
            stream_options={"include_usage": asked},
        )
    )  # fmt: skip
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    if asked:
        assert with_usage == [chunks[-1]]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens > 0
    else:
        assert not with_usage
        assert all(chunk.choices for chunk in chunks)


def test_stream_says_what_the_whole_answer_says(client):
    ask = {"model": "small", "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


async def test_async_client_and_many_at_once(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one(number):
            text = f"Count to {number}, please."
            stream = await client.chat.completions.create(
                model="auto", messages=[{"role": "user", "content": text}],
                max_tokens=6, stream=True,
            )  # fmt: skip
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        answers = await asyncio.gather(*(one(number) for number in range(4)))
    assert all(answers)


def test_parsed_output(client):
    class City(BaseModel):
        # Bounded, because a small model does not know when to end a text.
        size: Literal["small", "large"]
        coastal: bool

    answer = client.chat.completions.parse(
        model="large", messages=[{"role": "user", "content": "Describe a city as JSON."}],
        response_format=City, max_tokens=64, temperature=0,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, City)


def test_logprobs_whole_and_streamed(client):
    ask = {"model": "auto", "messages": ASK, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert whole and all(len(entry.top_logprobs) == 2 for entry in whole)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(streamed) == len(whole)


def test_no_logprobs_unless_asked(client):
    stream = client.chat.completions.create(model="auto", messages=ASK, max_tokens=4, stream=True)
    assert all(chunk.choices[0].logprobs is None for chunk in stream)


def test_n_answers(client):
    answer = client.chat.completions.create(model="auto", messages=ASK, max_tokens=4, n=2)
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    chunks = client.chat.completions.create(
        model="auto", messages=ASK, max_tokens=4, n=2, stream=True
    )
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


@pytest.mark.parametrize("many", [False, True])
def test_stop(client, many):
    ask = {"model": "small", "messages": ASK, "max_tokens": 16, "temperature": 0}
    text = client.chat.completions.create(**ask).choices[0].message.content
    word = next(word for word in text.split()[1:] if word)
    stop = [word, "neverthere"] if many else word
    choice = client.chat.completions.create(**ask, stop=stop).choices[0]
    assert word not in choice.message.content
    assert text.startswith(choice.message.content.rstrip())


def test_max_completion_tokens_is_max_tokens(client):
    ask = {"model": "small", "messages": ASK, "temperature": 0}
    old = client.chat.completions.create(**ask, max_tokens=3)
    new = client.chat.completions.create(**ask, max_completion_tokens=3)
    assert old.choices[0].message.content == new.choices[0].message.content
    assert new.choices[0].finish_reason == "length"
    same = client.chat.completions.create(**ask, max_tokens=3, max_completion_tokens=3)
    assert same.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ask, max_tokens=3, max_completion_tokens=4)
    assert error.value.param == "max_completion_tokens"


def test_content_parts_are_the_same_as_a_string(client):
    ask = {"model": "small", "max_tokens": 8, "temperature": 0}
    text = ASK[0]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    one = client.chat.completions.create(**ask, messages=ASK)
    other = client.chat.completions.create(**ask, messages=parts)
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage.prompt_tokens == other.usage.prompt_tokens


def test_developer_is_system(client):
    ask = {"model": "small", "max_tokens": 8, "temperature": 0}
    rule = {"content": "You answer in French only, and always very briefly."}
    answers = [
        client.chat.completions.create(**ask, messages=[{"role": role, **rule}, *ASK])
        for role in ("developer", "system")
    ]
    plain = client.chat.completions.create(**ask, messages=ASK)
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    assert answers[0].usage.prompt_tokens != plain.usage.prompt_tokens
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_history_of_tool_calls_with_null_content(client):
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="auto", messages=messages, max_tokens=4)
    assert answer.choices[0].message.content is not None


def test_completions(client):
    answer = client.completions.create(model="small", prompt="Once upon a time", max_tokens=4)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    stream = client.completions.create(
        model="small", prompt="Once upon a time", max_tokens=4, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_models(client):
    ids = [model.id for model in client.models.list()]
    assert ids[:3] == ["auto", "small", "large"]
    assert len(ids) == 5
    for name in ids:
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_models_own_name_is_its_tier(client, name):
    ids = [model.id for model in client.models.list()]
    own = ids[3] if name == "small" else ids[4]
    raw = client.chat.completions.with_raw_response.create(model=own, messages=ASK, max_tokens=2)
    assert raw.headers["x-baton-tier"] == name
    assert raw.headers["x-baton-reason"] == "forced_by_model"
    assert raw.parse().model == own


def test_tier_header(client):
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=ASK, max_tokens=2, extra_headers={"x-baton-tier": "large"}
    )
    assert raw.headers["x-baton-tier"] == "large"
    assert raw.headers["x-baton-kv"] == "none"
    assert raw.headers["x-baton-kv-tokens"] == "0"
    assert raw.headers["x-baton-session"]
    assert raw.headers["x-request-id"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": "hello"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_bad_parameter(client, wrong, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "auto", "messages": ASK, **wrong})
    body = error.value.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    assert body["param"] == param


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-none", messages=ASK)
    assert error.value.code == "model_not_found"


def test_embeddings_are_not_there(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model="auto", input="x")
    assert set(error.value.body) == {"message", "type", "param", "code"}
