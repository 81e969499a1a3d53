"""OpenAI's endpoints: what a request goes through, from its body to the last byte of its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from chairlift import card
from chairlift.errors import ModelNotFound, RequestError
from chairlift.server.answer import ChunkT, ResponseBuilder, WholeT
from chairlift.server.body import check_content_type, header, read_body
from chairlift.server.middleware import Caller, caller
from chairlift.server.prepare import PreparedRequest, Preparer
from chairlift.server.responses import JsonResponse, ModelEntry, ModelList
from chairlift.server.service import Service, service_of, until_gone
from chairlift.server.sse import collect, stream
from chairlift.text import one_line

TIMESTAMPS_HEADER = "x-chairlift-timestamps"
"""1: each event of a stream says when it was sent. For clients that cannot add a field to the body."""


class Generate(Generic[WholeT, ChunkT]):
    """POST to one of the two endpoints, as an ASGI application: it must see the client's disconnect itself."""

    def __init__(
        self,
        prepare: Callable[[Preparer, bytes, str], PreparedRequest],
        builder: type[ResponseBuilder[WholeT, ChunkT, Any]],
    ) -> None:
        self._prepare = prepare
        self._builder: type[ResponseBuilder[WholeT, ChunkT, Any]] = builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Before the first byte of a response it raises what is wrong; later errors are sent."""
        check_content_type(scope)
        service = service_of(scope)
        service.require_open()
        body = await read_body(scope, receive, service.config.body_limit_bytes)
        with service.answering():
            await until_gone(self._answer(service, scope, body, send), receive)

    async def _answer(self, service: Service, scope: Scope, body: bytes, send: Send) -> None:
        client, serving = caller(scope), service.serving
        asks_timestamps = _flag(scope, TIMESTAMPS_HEADER)
        serving.engine.require_room(client.key_name)
        prepared = await service.prepare(partial(self._prepare, serving.preparer), body, _answer_id(client))
        prepared = replace(prepared, asks_timestamps=asks_timestamps)
        requests = serving.preparer.requests(prepared, key_name=client.key_name)
        builder = self._builder(prepared, requests, serving.loaded)
        with service.submitted(requests) as collector:
            if prepared.body.stream:
                await stream(builder, collector, send, service.pace, partial(serving.queue_status.comment, requests))
                return
            whole = await collect(builder, collector)
        await JsonResponse(whole)(scope, _never, send)


def _flag(scope: Scope, name: str) -> bool:
    """A header that is 0 or 1, and 0 if absent. RequestError for any other value."""
    given = header(scope, name.encode())
    if given not in (None, b"0", b"1"):
        raise RequestError(f"the header `{name}` must be 0 or 1", param=name)
    return given == b"1"


async def _never() -> Any:
    raise AssertionError("a whole response reads nothing")


def _answer_id(client: Caller) -> str:
    """The id of an answer holds the request's id, which the log has too. A client's own id gets a unique suffix."""
    return client.request_id if client.is_own_id else f"{client.request_id}-{secrets.token_hex(4)}"


def _entries(service: Service) -> list[ModelEntry]:
    loaded = service.require_open().loaded
    return [
        {
            "id": name,
            "object": "model",
            "created": int(service.started_s),
            "owned_by": "chairlift",
            "root": loaded.names[0],
            "max_model_len": loaded.plan.max_model_len,
            "chairlift": card.facts(loaded),
        }
        for name in loaded.names
    ]


async def models(request: Request) -> JsonResponse[ModelList]:
    """GET /v1/models: every name, with what the start card says. 503 while loading."""
    return JsonResponse({"object": "list", "data": _entries(service_of(request.scope))})


async def model(request: Request) -> JsonResponse[ModelEntry]:
    """GET /v1/models/{name}."""
    name = request.path_params["name"]
    known = {entry["id"]: entry for entry in _entries(service_of(request.scope))}
    if name not in known:
        raise ModelNotFound(one_line(name), list(known))
    return JsonResponse(known[name])
