"""The OpenAPI document, made of the route table and of the types of requests and responses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from chairlift import __version__
from chairlift.server.responses import ErrorBody, ErrorEvent

if TYPE_CHECKING:
    from chairlift.server.routes import Endpoint

Json = dict[str, Any]

_TIMESTAMPS = {
    "name": "X-Chairlift-Timestamps",
    "in": "header",
    "description": "1: each event of a stream says when it was sent",
    "schema": {"type": "string", "enum": ["0", "1"]},
}
_EXTRA_HEADERS = {401: {"WWW-Authenticate": "string"}, 503: {"Retry-After": "integer"}}
"""Response headers of an error, by status: name and type."""


def describe(endpoints: Iterable[Endpoint[Any]]) -> Json:
    """The OpenAPI 3.1 document."""
    document = _Document(endpoints)
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.openapi_path, {})[endpoint.method.lower()] = document.operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": __version__},
        "components": {
            "schemas": document.schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }


class _Document:
    """Knows the schema of each type. `schemas` are the components that they refer to."""

    def __init__(self, endpoints: Iterable[Endpoint[Any]]) -> None:
        kinds: list[Any] = [kind for e in endpoints for kind in (e.request, e.response, e.event) if kind is not None]
        kinds += [ErrorBody, ErrorEvent]
        self._by_type, components = TypeAdapter.json_schemas(
            [(kind, "validation", TypeAdapter(kind)) for kind in kinds], ref_template="#/components/schemas/{model}"
        )
        self.schemas: Json = components["$defs"]

    def operation(self, endpoint: Endpoint[Any]) -> Json:
        """What a method of a path takes and returns."""
        content = {endpoint.media_type: {"schema": self._schema(endpoint.response)}}
        if endpoint.event is not None:
            content["text/event-stream"] = {"schema": self._event(endpoint.event)}
        success = {"description": "The response", "headers": _headers(), "content": content}
        statuses = sorted((*endpoint.errors, *(() if endpoint.is_open else (401,))))
        made: Json = {
            "summary": endpoint.summary,
            "responses": {
                **{str(status): success for status in endpoint.statuses},
                **{str(status): self._error(status) for status in statuses},
            },
        }
        names = re.findall(r"{(\w+)}", endpoint.openapi_path)
        schema = {"type": "string", "minLength": 1}
        parameters: list[Json] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
        parameters += [_TIMESTAMPS] if endpoint.event is not None else []
        if parameters:
            made["parameters"] = parameters
        if not endpoint.is_open:
            made["security"] = [{}, {"key": []}]  # a server without keys asks for none
        if endpoint.request is not None:
            body = {"application/json": {"schema": self._schema(endpoint.request)}}
            made["requestBody"] = {"required": True, "content": body}
        return made

    def _schema(self, kind: Any) -> Json:
        return self._by_type[kind, "validation"]

    def _event(self, kind: Any) -> Json:
        """One event of a stream."""
        chunks = {"anyOf": [self._schema(kind), self._schema(ErrorEvent)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunks}
        return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}}

    def _error(self, status: int) -> Json:
        headers = _headers(**_EXTRA_HEADERS.get(status, {}))
        content = {"application/json": {"schema": self._schema(ErrorBody)}}
        return {"description": HTTPStatus(status).phrase, "headers": headers, "content": content}


def _headers(**others: str) -> Json:
    """Response headers by name and type; each is always there."""
    types = {"X-Request-Id": "string", **others}
    return {name: {"required": True, "schema": {"type": kind}} for name, kind in types.items()}
