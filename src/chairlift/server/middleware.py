"""What surrounds every request: its id, the error that it may end in, and its API key.

Plain ASGI, since Starlette's BaseHTTPMiddleware would hide a client's disconnect from the endpoint.

    RequestId ─> CORS ─> Errors ─> Auth ─> routes
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import ChairliftError, Unauthorized
from chairlift.keys import Keyring
from chairlift.server.body import header
from chairlift.server.http_errors import ClientGone, error_response, status_of
from chairlift.server.log import write

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class Caller:
    """The sender of a request. The middleware sets it, and endpoints read it."""

    request_id: str
    is_own_id: bool  # made here, so that no other request has it
    key_name: str = ""  # "" where the server has no keys


def caller(scope: Scope) -> Caller:
    """The caller of a request."""
    found: Caller = scope["caller"]
    return found


class RequestId:
    """Gives each request an id, the client's own if it is well-formed, and returns it in `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = (header(scope, b"x-request-id") or b"").decode("latin-1")
        is_sound = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if is_sound else uuid.uuid4().hex
        scope["caller"] = Caller(request_id, is_own_id=not is_sound)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Errors:
    """Answers every exception with the one error body. `on_refused` gets the code of each."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientGone:
            return
        except Exception as error:
            client = caller(scope)
            if not isinstance(error, ChairliftError):
                log.exception("request %s failed", client.request_id)
            if has_started:
                return
            code = error.code if isinstance(error, ChairliftError) else ChairliftError.code
            fields = {"id": client.request_id, "status": status_of(error), "code": code, "key": client.key_name or "-"}
            write("refused", fields)
            self._on_refused(code)
            await error_response(error)(scope, receive, send)


class Auth:
    """Requires an API key, as `Authorization: Bearer KEY`, on all paths but the open ones."""

    def __init__(self, app: ASGIApp, keys: Keyring, open_paths: Container[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises Unauthorized."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller(scope).key_name = self._key_name(scope)
        await self._app(scope, receive, send)

    def _key_name(self, scope: Scope) -> str:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        name = self._keys.name_of(key.strip()) if scheme.lower() == b"bearer" else None
        if name is None:
            raise Unauthorized(
                "this server needs an API key",
                hint="send it as `Authorization: Bearer KEY`; this one is missing or wrong",
            )
        return name
