"""GET /openapi.json: the API as machines read it, made from the request models, so that it cannot say anything else."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.server.problem import JsonResponse
from chairlift.server.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/"


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail = Field()


async def openapi(_: Request) -> Response:
    """GET /openapi.json."""
    return JsonResponse(description())


@functools.cache
def description() -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    models: list[type[BaseModel]] = [ChatRequest, CompletionRequest, ErrorBody]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF + "{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": __version__},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/v1/chat/completions": {"post": _generate("Answers a conversation.", ChatRequest)},
            "/v1/completions": {"post": _generate("Continues a text.", CompletionRequest)},
            "/v1/models": {"get": _get("The names of the model served, and how it is sized.", 401, 503)},
            "/v1/models/{name}": {"get": {**_get("One of them.", 401, 404, 503), "parameters": [_NAME]}},
            "/v1/queue": {"get": _get("Who waits, in which place, and for how long still.", 401, 503)},
            "/health": {"get": _state("200 when requests are taken and make progress.")},
            "/live": {"get": _state("503 only when a restart is needed.")},
            "/metrics": {
                "get": {"summary": "For Prometheus.", "responses": {"200": _ok("text/plain"), **_errors(503)}}
            },
            "/version": {"get": _get("This server's version.")},
        },
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _generate(summary: str, model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + model.__name__}}}
    answer = {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
    return {
        "summary": summary,
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": content},
        "responses": {"200": answer, **_errors(400, 401, 404, 413, 415, 500, 503)},
    }


def _get(summary: str, *errors: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _ok("application/json"), **_errors(*errors)}}


def _state(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _ok("application/json"), "503": _ok("application/json")}}


def _ok(kind: str) -> dict[str, Any]:
    return {"description": "As asked", "content": {kind: {}}}


def _errors(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + "ErrorBody"}}}
    return {str(status): {"description": "Why not", "content": content} for status in statuses}
