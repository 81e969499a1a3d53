"""Errors as HTTP says them: the ones that only a protocol can have, and the one body that every error is sent in.

    {"error": {"message": str, "type": str, "param": str | null, "code": str, ...}}        OpenAI's shape

`type` is invalid_request_error below 500 and server_error from 500 on; `code` is the class's. A body always serialises,
never holds the client's input at length and never an exception that is not ours.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from chairlift.errors import (
    Busy,
    ChairliftError,
    ContextLengthExceeded,
    Draining,
    RequestError,
    Unauthorized,
    Unavailable,
)
from chairlift.text import one_line

MAX_MESSAGE_CHARS = 1000


class InvalidHttp(RequestError):
    """Bytes that are no request."""

    code = "invalid_http"


class HeadTooLarge(RequestError):
    """431: the request line and the headers exceed the limit."""

    code = "headers_too_large"
    http_status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request line and the headers exceed {limit_bytes} bytes")


class InvalidJson(RequestError):
    """A body that is not JSON."""

    code = "invalid_json"


class UnsupportedParameter(RequestError):
    """A field this server knows, with a value that it would have to ignore."""

    code = "unsupported_parameter"

    def __init__(self, name: str, accepted: str) -> None:
        super().__init__(f"`{name}` is not supported by this server; it may only be {accepted}", param=name)


class UnknownParameter(RequestError):
    """A field this server does not know; only with --strict."""

    code = "unknown_parameter"

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown field `{one_line(name)}`", param=one_line(name))


class BodyTooLarge(RequestError):
    """413: the body exceeds the limit."""

    code = "request_too_large"
    http_status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body exceeds {limit_bytes} bytes", hint="see --body-limit-bytes")


class WrongContentType(RequestError):
    """415: a body that does not say it is JSON, or that is compressed.

    A web page can send other types to any address without asking, so that this check also keeps foreign pages out.
    """

    code = "unsupported_media_type"
    http_status = 415


class NoSuchPath(RequestError):
    """404: nothing is served under this path."""

    code = "not_found"
    http_status = 404


class WrongMethod(RequestError):
    """405: the path is served, but not with this method."""

    code = "method_not_allowed"
    http_status = 405


class Loading(Unavailable):
    """503: the model is not ready yet."""

    code = "loading"

    def __init__(self) -> None:
        super().__init__("the model is still loading", hint="/health tells when it is ready")


class Interrupted(Unavailable):
    """The server ended a request that it had begun: the time for draining was over.

    Not 503, which tells a proxy that nothing was begun and that it may ask elsewhere.
    """

    code = "interrupted"
    http_status = 500


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def error_body(error: Exception) -> dict[str, Any]:
    """The body for any exception; what is not ours is only called an internal error."""
    known = error if isinstance(error, ChairliftError) else ChairliftError("internal error; the log has more")
    is_ours = known.http_status >= 500
    detail: dict[str, Any] = {
        "message": one_line(str(known), MAX_MESSAGE_CHARS),
        "type": "server_error" if is_ours else "invalid_request_error",
        "param": known.param if isinstance(known, RequestError) else None,
        "code": known.code,
    }
    if isinstance(known, ContextLengthExceeded):
        detail |= {"num_prompt_tokens": known.num_prompt_tokens, "limit": known.limit}
    if isinstance(known, Busy):
        expected_wait_s = round(known.expected_wait_s, 1)
        detail |= {"waiting": known.num_waiting, "running": known.num_running, "expected_wait_s": expected_wait_s}
    if isinstance(known, Unavailable):
        detail |= {"retry_after_s": known.retry_after_s}
    return {"error": detail}


def status_of(error: Exception) -> int:
    """The HTTP status of any exception."""
    return error.http_status if isinstance(error, ChairliftError) else 500


def headers_of(error: Exception) -> dict[str, str]:
    """What an error says beside its body."""
    if isinstance(error, Unavailable):
        leave = {"connection": "close"} if isinstance(error, Draining) else {}  # the next request must go elsewhere
        return {"retry-after": str(error.retry_after_s)} | leave
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


def encode(value: object) -> bytes:
    """JSON in ASCII without spaces; a NaN is a bug and raises."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class JsonResponse(Response):
    """One whole JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return encode(content)


def error_response(error: Exception) -> JsonResponse:
    """One error as a whole response."""
    return JsonResponse(error_body(error), status_of(error), headers_of(error))
