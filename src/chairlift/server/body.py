"""A request's body: read within its limit, and parsed as JSON that every program can read."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic_core import from_json
from starlette.types import Receive, Scope

from chairlift.server.http_errors import BodyTooLarge, ClientGone, InvalidJson, WrongContentType
from chairlift.text import one_line

_JSON_TYPE = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def check_content_type(scope: Scope) -> None:
    """Raises WrongContentType unless the body is declared as JSON and is not compressed."""
    if _JSON_TYPE.fullmatch(header(scope, b"content-type") or b"") is None:
        raise WrongContentType("the body must be JSON, sent with `Content-Type: application/json`")
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise WrongContentType("the body must be sent as it is, without `Content-Encoding`")


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge for its declared length, or as soon as it grows beyond the limit."""
    declared = header(scope, b"content-length") or b""
    # More than 18 digits are too large in any case.
    if declared.isdigit() and (len(declared.lstrip(b"0")) > 18 or int(declared) > limit_bytes):
        raise BodyTooLarge(limit_bytes)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        more = message.get("more_body", False)
    return b"".join(parts)


def parse_json(body: bytes) -> Any:
    """The value. Raises InvalidJson for anything that is not JSON in UTF-8.

    It also refuses NaN and infinities, numbers that overflow to one (1e999), lone surrogates, nesting beyond 200, and
    an object with the same name twice, since one of the two values would have to be ignored.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from None
    # The first parser silently keeps the last of two values and turns 1e999 into an infinity. The second one sees all
    # pairs and numbers. Neither holds the interpreter for long: 50 ms together for 20 MB.
    json.loads(body, object_pairs_hook=_refuse_twins, parse_float=_refuse_overflow)
    return value


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidJson(f"the body names `{one_line(name)}` twice in one object")
        seen.add(name)


def _refuse_overflow(digits: str) -> None:
    if math.isinf(float(digits)):
        raise InvalidJson("the body is not valid JSON: a number is too large")
