"""The same suite of the official client, against real SGLang workers behind the gateway."""

import json

import openai
import pytest

from tests.contract.suite import *  # noqa: F403

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def base_url(real_stack):
    return f"{real_stack.config.url('gateway')}/v1"


def test_the_workers_own_refusal_has_the_shape(client):
    # The gateway does not know this field, and the worker does not like its value.
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"min_p": "much"},
        )
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert error.value.body["type"] == "invalid_request_error"
    assert error.value.param == "min_p"


def test_a_prompt_that_is_too_long_is_a_400(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "word " * 20000}], stream=True
        )
    assert error.value.body["type"] == "invalid_request_error"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOL_ASK = {
    "model": "large",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER],
    "max_tokens": 48,
    "temperature": 0,
    "parallel_tool_calls": False,
}
TOOL_CHOICES = ["required", {"type": "function", "function": {"name": "get_weather"}}]


def called(choice) -> dict:
    # So small a model may talk on after its call until the limit, which is then the reason.
    assert choice.finish_reason in ("tool_calls", "length")
    (call,) = choice.message.tool_calls
    assert call.id and call.type == "function" and call.function.name == "get_weather"
    return json.loads(call.function.arguments)


@pytest.mark.parametrize("choice", TOOL_CHOICES, ids=["required", "named"])
def test_the_worker_calls_a_tool_and_reads_its_result(client, choice):
    first = client.chat.completions.create(**TOOL_ASK, tool_choice=choice).choices[0]
    assert called(first)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "sunny"}
    turn = TOOL_ASK | {"messages": [*TOOL_ASK["messages"], first.message, result]}
    answer = client.chat.completions.create(**turn, tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


def test_the_worker_streams_a_tool_call(client):
    fragments = []
    stream = client.chat.completions.create(**TOOL_ASK, tool_choice="required", stream=True)
    for chunk in stream:
        fragments += [call for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert fragments[0].id and fragments[0].function.name == "get_weather" and len(fragments) > 1
    arguments = "".join(fragment.function.arguments or "" for fragment in fragments)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


async def test_the_async_client_gets_a_tool_call(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0) as client:
        answer = await client.chat.completions.create(**TOOL_ASK, tool_choice="required")
    assert called(answer.choices[0])["city"] in ("Paris", "Rome")
