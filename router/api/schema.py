"""Checks request bodies before a worker is touched, and describes them in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from router.errors import ApiError

Text = Annotated[str, Field(max_length=64 * 1024 * 1024)]
Stop = str | Annotated[list[str], Field(max_length=16)] | None


class Open(BaseModel):
    # Strict: "1" is not a number. Open: what is not known here is the worker's business.
    model_config = ConfigDict(strict=True, extra="allow")


class Part(Open):
    type: str
    text: Text | None = None

    @model_validator(mode="after")
    def _text_has_text(self) -> Self:
        if self.type == "text" and self.text is None:
            raise PydanticCustomError("missing", "a part of type text needs text")
        return self


class Function(Open):
    name: str
    arguments: str = "{}"


class ToolCall(Open):
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Open):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        # Only an answer may be without content: it may consist of tool calls.
        if self.role != "assistant" and self.content is None:
            raise PydanticCustomError("missing", "a message of this role needs content")
        return self


class ToolFunction(Open):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    type: str
    function: ToolFunction | None = None


class StreamOptions(Open):
    include_usage: bool | None = None


class Sampling(Open):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop = None
    user: str | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _stream_options_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "value", "stream_options is only for streams", {"param": "stream_options"}
            )
        return self


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "value",
                "max_tokens and max_completion_tokens mean the same and differ",
                {"param": "max_completion_tokens"},
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "value", "top_logprobs needs logprobs to be true", {"param": "top_logprobs"}
            )
        return self


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None


Model = TypeVar("Model", bound=Sampling)


def parse(raw: bytes, schema: type[Model]) -> dict[str, Any]:
    """The body as sent, once it has been checked."""
    try:
        body = orjson.loads(raw)
        # What cannot be written again cannot be passed on (nesting is limited).
        orjson.dumps(body)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        schema.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    return body


def _refusal(error: ValidationError) -> ApiError:
    # The input stays out of the message: it is the client's prompt.
    items = error.errors(include_input=False, include_url=False)
    item = items[0]
    param = item.get("ctx", {}).get("param") or _param(item["loc"])
    message = item["msg"]
    code = "invalid_value"
    if item["type"] == "missing":
        code = "missing_required_parameter"
    elif item["type"].endswith("_type"):
        code = "invalid_type"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str | None:
    """messages[0].content, without pydantic's names for the members of a union."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in ("str", "int", "float", "bool", "none") or not part.isidentifier():
            continue
        else:
            text += f".{part}" if text else part
    return text or None
