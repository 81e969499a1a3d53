"""GET /openapi.json: the API as machines read it, made from the models of requests and of responses.

Requests are read by the same models (schema.py), and tests hold every response against the others (responses.py).
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.server import responses
from chairlift.server.http_errors import JsonResponse
from chairlift.server.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/"
_MODELS: list[type[BaseModel]] = [
    ChatRequest,
    responses.ChatCompletion,
    responses.ChatChunk,
    CompletionRequest,
    responses.TextCompletion,
    responses.TextChunk,
    responses.ErrorBody,
    responses.ErrorEvent,
    responses.ModelList,
    responses.Queue,
    responses.Health,
    responses.Live,
    responses.Version,
    responses.Root,
]


async def openapi(_: Request) -> Response:
    """GET /openapi.json."""
    return JsonResponse(description())


@functools.cache
def description() -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF + "{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": __version__},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _generate("Answers a conversation.", ChatRequest, responses.ChatCompletion, responses.ChatChunk)
            },
            "/v1/completions": {
                "post": _generate("Continues a text.", CompletionRequest, responses.TextCompletion, responses.TextChunk)
            },
            "/v1/models": {
                "get": _get("The names of the model served, and how it is sized.", responses.ModelList, 401, 503)
            },
            "/v1/models/{name}": {
                "get": {**_get("One of them.", responses.ModelEntry, 401, 404, 503), "parameters": [_NAME]}
            },
            "/v1/queue": {"get": _get("Who waits, in which place, and for how long still.", responses.Queue, 401, 503)},
            "/health": {"get": _state("200 when requests are taken and make progress.", responses.Health)},
            "/live": {"get": _state("503 only when a restart is needed.", responses.Live)},
            "/metrics": {
                "get": {
                    "summary": "For Prometheus.",
                    "responses": {"200": _reply("text/plain", {"type": "string"}), **_errors(503)},
                }
            },
            "/version": {"get": _get("This server's version.", responses.Version)},
            "/openapi.json": {
                "get": {"summary": "This.", "responses": {"200": _reply("application/json", {"type": "object"})}}
            },
            "/": {"get": _get("Where to go from here.", responses.Root)},
        },
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_TIMESTAMPS = {
    "name": "X-Chairlift-Timestamps",
    "in": "header",
    "description": "1: each event of a stream says when it was sent",
    "schema": {"type": "string", "enum": ["0", "1"]},
}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF + model.__name__}


def _generate(
    summary: str, request: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel]
) -> dict[str, Any]:
    """One of the two endpoints; the schema beside `text/event-stream` is that of one event."""
    chunks = {"anyOf": [_ref(chunk), _ref(responses.ErrorEvent)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunks}
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}}
    content = {"application/json": {"schema": _ref(answer)}, "text/event-stream": {"schema": event}}
    return {
        "summary": summary,
        "security": [{}, {"key": []}],
        "parameters": [_TIMESTAMPS],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {
            "200": {"description": "The answer", "headers": _headers(), "content": content},
            **_errors(400, 401, 404, 413, 415, 500, 503),
        },
    }


def _get(summary: str, model: type[BaseModel], *errors: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _reply("application/json", _ref(model)), **_errors(*errors)}}


def _state(summary: str, model: type[BaseModel]) -> dict[str, Any]:
    reply = _reply("application/json", _ref(model))
    return {"summary": summary, "responses": {"200": reply, "503": reply}}


def _reply(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "As asked", "headers": _headers(), "content": {kind: {"schema": schema}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _error(status) for status in statuses}


def _error(status: int) -> dict[str, Any]:
    headers = _headers(**_EXTRA_HEADERS.get(status, {}))
    return {
        "description": "Why not",
        "headers": headers,
        "content": {"application/json": {"schema": _ref(responses.ErrorBody)}},
    }


_EXTRA_HEADERS: dict[int, dict[str, str]] = {401: {"WWW-Authenticate": "string"}, 503: {"Retry-After": "integer"}}


def _headers(**others: str) -> dict[str, Any]:
    """Response headers by name and type; each is always there."""
    types = {"X-Request-Id": "string", **others}
    return {name: {"required": True, "schema": {"type": kind}} for name, kind in types.items()}
