"""The ASGI application: routes, middleware, and a lifespan that loads the model and ends the engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.server.http_errors import NoSuchPath, WrongMethod, error_response
from chairlift.server.middleware import Auth, Errors, RequestId
from chairlift.server.routes import OPEN_PATHS, routes
from chairlift.server.service import Service
from chairlift.server.sse import Pace


def create_app(load: Callable[[], Loaded], config: Config, *, pace: Pace | None = None) -> Starlette:
    """The application. Its lifespan calls `load` in a thread, so that /live and /health answer meanwhile."""
    service = Service(load, config, pace or Pace())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = Starlette(
        routes=routes(),
        middleware=_middleware(service),
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _middleware(service: Service) -> list[Middleware]:
    """From the outermost to the innermost."""
    stack = [Middleware(RequestId)]
    if service.config.cors_origin:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.config.cors_origin),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    stack.append(Middleware(Errors, on_refused=service.refused))
    keys = service.config.keyring()
    if keys:
        stack.append(Middleware(Auth, keys=keys, open_paths=OPEN_PATHS))
    return stack


async def _http_error(_: Request, error: Exception) -> Response:
    """Answers what the router raises: an unknown path, or a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == WrongMethod.http_status:
        response = error_response(WrongMethod("this path is not served with that method"))
    else:
        response = error_response(NoSuchPath("nothing is served under this path", hint="GET / lists what is"))
    response.headers.update(error.headers or {})
    return response
