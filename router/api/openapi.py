"""GET /openapi.json: the description of the public API."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.api.admin import MOST, Detail, SessionList
from router.api.schema import ChatRequest, CompletionRequest
from router.auth.keys import OPEN
from router.sessions.identity import MAX_ID
from router.workers.worker import CHAT, COMPLETIONS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_HEADERS: dict[str, dict[str, Any]] = {
    "x-session-id": {"type": "string", "maxLength": MAX_ID},
    "x-baton-tier": {"type": "string", "enum": ["small", "large"]},
    "x-baton-policy": {"type": "string"},
    "x-baton-explain": {"type": "string", "enum": ["1", "true", "yes"]},
    "x-request-id": {"type": "string", "maxLength": 128},
}


async def serve(request: Request) -> Response:
    return JSONResponse(describe())


@cache
def describe() -> dict[str, Any]:
    _, definitions = models_json_schema(
        [
            (ChatRequest, "validation"),
            (CompletionRequest, "validation"),
            (SessionList, "serialization"),
            (Detail, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton gateway", "version": "1"},
        "paths": {
            CHAT: {"post": _post("ChatRequest", "A chat completion, streamed or whole.")},
            COMPLETIONS: {"post": _post("CompletionRequest", "A text completion.")},
            "/v1/models": {"get": _get("The models and aliases this key may use.")},
            "/v1/models/{model}": {"get": {**_get("One model."), "parameters": [model]}},
            "/health": {"get": _get("Whether the process is alive.")},
            "/ready": {"get": _get("Whether traffic should come here.")},
            **_admin(),
        },
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "http", "scheme": "bearer", "description": "The admin key."},
            },
        },
        "security": [{"key": []}, {}],
    }


def _admin() -> dict[str, Any]:
    """The operators' paths; `tenant` is whose sessions are meant."""

    def parameter(name: str, schema: dict[str, Any], where: str = "query") -> dict[str, Any]:
        return {"name": name, "in": where, "required": where == "path", "schema": schema}

    def operation(text: str, answer: str | None, *parameters: dict[str, Any]) -> dict[str, Any]:
        good = {"204": {"description": "Deleted"}}
        if answer is not None:
            good = {"200": _content({"$ref": f"#/components/schemas/{answer}"})}
        return {
            "summary": text,
            "tags": ["admin"],
            "security": [{"admin": []}],
            "parameters": [tenant, *parameters],
            "responses": {**good, **_errors()},
        }

    tenant = parameter("tenant", {"type": "string", "default": OPEN.tenant})
    session = parameter("session", {"type": "string", "minLength": 1}, "path")
    limit = parameter("limit", {"type": "integer", "minimum": 1, "maximum": MOST})
    before = parameter("before", {"type": "number"})
    return {
        "/admin/sessions": {
            "get": operation("A tenant's sessions, latest first.", "SessionList", limit, before)
        },
        "/admin/sessions/{session}": {
            "get": operation(
                "A session: its turns, what KV each ran on, drift and saved seconds.",
                "Detail",
                session,
            ),
            "delete": operation("Forgets a session.", None, session),
        },
        "/admin/sessions/{session}/reanchor": {
            "post": operation(
                "Gives up mapped KV: each model's next turn is prefilled exactly.",
                "Detail",
                session,
            )
        },
    }


def _get(text: str) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": _content({"type": "object"}), **_errors()}}


def _post(body: str, text: str) -> dict[str, Any]:
    answer = _content({"type": "object"})
    answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": text,
        "parameters": [
            {"name": name, "in": "header", "required": False, "schema": schema}
            for name, schema in _HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        },
        "responses": {"200": answer, **_errors()},
    }


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "OK", "content": {"application/json": {"schema": schema}}}


def _errors() -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        "default": {
            "description": "An error in the shape of the OpenAI API.",
            "content": {"application/json": {"schema": schema}},
        }
    }
