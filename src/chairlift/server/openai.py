"""OpenAI's endpoints: what a request goes through, from its body to the last byte of its answer."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift import card
from chairlift.errors import ModelNotFound, RequestError
from chairlift.server.answer import Answer
from chairlift.server.body import check_content_type, header, read_body
from chairlift.server.http_errors import JsonResponse
from chairlift.server.middleware import Caller, caller
from chairlift.server.service import Service, until_gone
from chairlift.server.sse import collect, stream
from chairlift.text import one_line

TIMESTAMPS_HEADER = "x-chairlift-timestamps"
"""1: each event of a stream says when it was sent. For clients that cannot add a field to the body."""


class Generate:
    """POST /v1/chat/completions or /v1/completions, as an ASGI application: it must see disconnects itself."""

    def __init__(self, service: Service, kind: Literal["chat", "completion"]) -> None:
        self._service = service
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises what cannot be answered with a 200, before anything is sent."""
        check_content_type(scope)
        self._service.require_open()
        body = await read_body(scope, receive, self._service.config.body_limit_bytes)
        with self._service.answering():
            await until_gone(self._answer(scope, body, send), receive)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        service, who = self._service, caller(scope)
        serving = service.serving
        preparer = serving.preparer
        make = preparer.chat if self._kind == "chat" else preparer.completion
        asks_timestamps = _flag(scope, TIMESTAMPS_HEADER)
        serving.engine.require_room(who.key_name)
        job = await service.prepare(make, body, _answer_id(who))
        job = replace(job, asks_timestamps=asks_timestamps)
        requests = preparer.requests(job, key_name=who.key_name)
        answer = Answer.to(job, requests, serving.loaded)
        with service.submitted(requests) as listener:
            if job.body.stream:
                await stream(answer, listener, send, service.pace, partial(serving.board.comment, requests))
                return
            whole = await collect(answer, listener)
        await JsonResponse(whole)(scope, _never, send)


def _flag(scope: Scope, name: str) -> bool:
    """A header that is 0 or 1. RequestError for any other value."""
    given = header(scope, name.encode())
    if given not in (None, b"0", b"1"):
        raise RequestError(f"the header `{name}` must be 0 or 1", param=name)
    return given == b"1"


async def _never() -> Any:
    raise AssertionError("a whole response reads nothing")


def _answer_id(who: Caller) -> str:
    """The id of an answer: the request's, which the log can be searched for; made unique where a client chose it."""
    return who.request_id if who.is_own_id else f"{who.request_id}-{secrets.token_hex(4)}"


def _models(service: Service) -> list[dict[str, Any]]:
    serving = service.serving
    service.require_open()
    loaded = serving.loaded
    plan = loaded.plan
    return [
        {
            "id": name,
            "object": "model",
            "created": int(service.started_s),
            "owned_by": "chairlift",
            "root": loaded.names[0],
            "max_model_len": plan.max_model_len,
            "chairlift": card.facts(loaded),
        }
        for name in loaded.names
    ]


async def models(request: Request) -> Response:
    """GET /v1/models: every name, with what the start card says. 503 while loading."""
    return JsonResponse({"object": "list", "data": _models(request.app.state.service)})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    name = request.path_params["name"]
    known = {model["id"]: model for model in _models(request.app.state.service)}
    if name not in known:
        raise ModelNotFound(one_line(name), list(known))
    return JsonResponse(known[name])
