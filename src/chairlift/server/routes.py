"""The route table: every path, its handler, and what it takes and returns.

Starlette's routes, /openapi.json and the paths that need no API key are all made of it. mypy checks that the response
type in a line is the one that its handler returns.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route

from chairlift.server import health, openai, responses
from chairlift.server.answer import ChatBuilder, ChunkT, TextBuilder, WholeT
from chairlift.server.openapi import describe
from chairlift.server.prepare import Preparer
from chairlift.server.responses import BodyT, JsonResponse, TypedResponse
from chairlift.server.schema import ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[BodyT]):
    """One line of the table."""

    method: Literal["GET", "POST"]
    path: str  # as Starlette writes it: "{name:path}" may hold slashes
    handler: Callable[[Request], Awaitable[TypedResponse[BodyT]]] | openai.Generate[Any, Any]
    response: type[BodyT]
    summary: str
    is_open: bool = False  # needs no API key
    errors: tuple[int, ...] = ()  # statuses that have an error's body, beside 401
    statuses: tuple[int, ...] = (200,)  # statuses that have a body of the response's type
    media_type: str = "application/json"
    request: type[BaseModel] | None = None
    event: Any = None  # the type of a stream's events, where the response may be a stream

    @property
    def openapi_path(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)


def _generate(
    path: str,
    handler: openai.Generate[WholeT, ChunkT],
    request: type[BaseModel],
    response: type[WholeT],
    event: type[ChunkT],
    summary: str,
) -> Endpoint[WholeT]:
    errors = (400, 404, 413, 415, 500, 503)
    return Endpoint("POST", path, handler, response, summary, errors=errors, request=request, event=event)


@functools.cache
def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return describe(ENDPOINTS)


async def openapi(_: Request) -> JsonResponse[dict[str, Any]]:
    """GET /openapi.json."""
    return JsonResponse(description())


# fmt: off
ENDPOINTS = (
    _generate("/v1/chat/completions", openai.Generate(Preparer.chat, ChatBuilder),
              ChatRequest, responses.ChatCompletion, responses.ChatChunk, "Answers a conversation."),
    _generate("/v1/completions", openai.Generate(Preparer.completion, TextBuilder),
              CompletionRequest, responses.TextCompletion, responses.TextChunk, "Continues a text."),
    Endpoint("GET", "/v1/models", openai.models, responses.ModelList,
             "The names of the model served, and how it is sized.", errors=(503,)),
    Endpoint("GET", "/v1/models/{name:path}", openai.model, responses.ModelEntry,
             "One of them.", errors=(404, 503)),
    Endpoint("GET", "/v1/queue", health.queue, responses.Queue,
             "Which requests wait, and for how long still.", errors=(503,)),
    Endpoint("GET", "/health", health.health, responses.Health,
             "200 when requests are taken and make progress.", is_open=True, statuses=(200, 503)),
    Endpoint("GET", "/live", health.live, responses.Liveness,
             "503 only when a restart is needed.", is_open=True, statuses=(200, 503)),
    Endpoint("GET", "/metrics", health.exposition, str,
             "The metrics, for Prometheus.", is_open=True, errors=(503,), media_type="text/plain"),
    Endpoint("GET", "/version", health.version, responses.Version, "This server's version.", is_open=True),
    Endpoint("GET", "/openapi.json", openapi, dict[str, Any], "This document.", is_open=True),
    Endpoint("GET", "/", health.root, responses.Root, "The paths that this server serves.", is_open=True),
)
# fmt: on

OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_open)
"""Paths that need no API key: probes and scrapers have none, and these paths tell nothing of a user."""


def routes() -> list[Route]:
    """For Starlette."""
    return [Route(endpoint.path, endpoint.handler, methods=[endpoint.method]) for endpoint in ENDPOINTS]
