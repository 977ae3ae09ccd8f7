"""The official client against scripted workers: the suite, and what only a script can show."""

from tests.contract.suite import *  # noqa: F403
from tests.contract.suite import ASK, TOOL


def test_streamed_tool_call(client):
    chunks = list(
        client.chat.completions.create(model="auto", messages=ASK, tools=[TOOL], stream=True)
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert all(call.index == 0 for call in deltas)
    assert [bool(call.id) for call in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(call.function.arguments or "" for call in deltas) == '{"city": "Paris"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_whole_tool_call_and_the_turn_after_it(client):
    first = client.chat.completions.with_raw_response.create(
        model="auto", messages=ASK, tools=[TOOL]
    )
    message = first.parse().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    # As an application does it: the client's own object goes back into the history.
    history = [*ASK, message, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    second = client.chat.completions.with_raw_response.create(
        model="auto", messages=history, tools=[TOOL]
    )
    assert second.headers["x-baton-session"] == first.headers["x-baton-session"]
    assert second.parse().choices[0].message.content


def test_stream_helper_with_tools(client):
    with client.chat.completions.stream(model="auto", messages=ASK, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].finish_reason == "tool_calls"
