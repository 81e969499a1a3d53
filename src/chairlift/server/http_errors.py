"""Errors as HTTP says them: those that only an HTTP server can have, and the one body that every error is sent in.

    {"error": {"message": str, "type": str, "param": str | null, "code": str, ...}}        OpenAI's shape

`type` is invalid_request_error below 500 and server_error from 500 on; `code` is the class's. A body can always be
encoded. It holds no long text of the client's, and no text of an exception that is not a ChairliftError.
"""

from __future__ import annotations

from chairlift.errors import (
    Busy,
    ChairliftError,
    ContextLengthExceeded,
    Draining,
    RequestError,
    Unauthorized,
    Unavailable,
)
from chairlift.server.responses import ErrorBody, ErrorDetail, JsonResponse
from chairlift.text import one_line

MAX_MESSAGE_CHARS = 1000


class InvalidHttp(RequestError):
    """400: the bytes received are not an HTTP request."""

    code = "invalid_http"


class HeadTooLarge(RequestError):
    """431: the request line and the headers exceed the limit."""

    code = "headers_too_large"
    http_status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request line and the headers exceed {limit_bytes} bytes")


class InvalidJson(RequestError):
    """400: the body is not JSON."""

    code = "invalid_json"


class UnsupportedParameter(RequestError):
    """400: the server knows the field and does not support this value."""

    code = "unsupported_parameter"

    def __init__(self, name: str, accepted: str) -> None:
        super().__init__(f"`{name}` is not supported by this server; it may only be {accepted}", param=name)


class UnknownParameter(RequestError):
    """400, with --strict only: the server does not know the field."""

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
    """415: the body is not declared as JSON, or is compressed.

    Browsers let a web page send other types to any address without a preflight, so this also keeps foreign pages out.
    """

    code = "unsupported_media_type"
    http_status = 415


class NoSuchPath(RequestError):
    """404: the server has no such path."""

    code = "not_found"
    http_status = 404


class WrongMethod(RequestError):
    """405: the path exists, but not with this method."""

    code = "method_not_allowed"
    http_status = 405


class Loading(Unavailable):
    """503: the model is not loaded or not warmed up yet."""

    code = "loading"

    def __init__(self) -> None:
        super().__init__("the model is still loading", hint="/health tells when it is ready")


class Interrupted(Unavailable):
    """500: the server ended a request that it had begun, since the time for draining was over.

    A 503 would tell a proxy that the request was not begun, and that it may be sent elsewhere.
    """

    code = "interrupted"
    http_status = 500


class ClientGone(Exception):
    """The client closed its connection: there is no one to answer, and no error."""


def error_body(error: Exception) -> ErrorBody:
    """The body for any exception. A foreign one is only called an internal error."""
    ours = error if isinstance(error, ChairliftError) else ChairliftError("internal error; the log has more")
    detail: ErrorDetail = {
        "message": one_line(str(ours), MAX_MESSAGE_CHARS),
        "type": "server_error" if ours.http_status >= 500 else "invalid_request_error",
        "param": ours.param if isinstance(ours, RequestError) else None,
        "code": ours.code,
    }
    if isinstance(ours, ContextLengthExceeded):
        detail["num_prompt_tokens"] = ours.num_prompt_tokens
        detail["limit"] = ours.limit
    if isinstance(ours, Busy):
        detail["waiting"] = ours.num_waiting
        detail["running"] = ours.num_running
        detail["expected_wait_s"] = round(ours.expected_wait_s, 1)
    if isinstance(ours, Unavailable):
        detail["retry_after_s"] = ours.retry_after_s
    return {"error": detail}


def status_of(error: Exception) -> int:
    """The HTTP status of any exception."""
    return error.http_status if isinstance(error, ChairliftError) else 500


def _headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, Unavailable):
        close = {"connection": "close"} if isinstance(error, Draining) else {}  # the next request must go elsewhere
        return {"retry-after": str(error.retry_after_s)} | close
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


def error_response(error: Exception) -> JsonResponse[ErrorBody]:
    """Any exception as a whole response."""
    return JsonResponse(error_body(error), status_of(error), _headers_of(error))
