"""The server as a whole: the ASGI application, and the process that runs it.

serve():  bind the port ──> accept (503 loading) ──> ready ──> SIGTERM: drain ──> exit 0
                                                                second signal ──> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift import boot, card
from chairlift.boot import Loaded
from chairlift.config import Config, notify_socket
from chairlift.errors import ChairliftError, ConfigError, EngineError
from chairlift.keys import Keyring
from chairlift.server import health, listener, log, openai, queue_endpoint
from chairlift.server.http_errors import NoSuchPath, WrongMethod, error_response
from chairlift.server.middleware import Auth, Errors, RequestId
from chairlift.server.notify import Manager
from chairlift.server.openapi import openapi
from chairlift.server.protocol import Protocol
from chairlift.server.service import Service
from chairlift.server.sse import Pace

_LINGER_S = 5
"""After draining, what uvicorn may take to see connections close."""
_LAST_CALL_S = 0.2
"""What somebody who has connected before the end may take to send a request, and be told that it is the end."""
_TICKS_PER_S = 10
_YOUNG_OBJECTS = 50_000
"""Objects that may be made, and not be gone, before a look for cycles among them: some 20 MB."""
_LARGE_BYTES = 1 << 20
"""Memory blocks of this size, bodies of long requests above all, go back to the system as soon as they are freed."""
_M_MMAP_THRESHOLD = -3
"""mallopt(3)."""
_TURN_S = 0.002
"""How long one thread may keep the interpreter from another: longer than the engine's turn between two steps (1 ms), so
that nobody cuts that short; no longer, since the engine may have to wait for so long after each step."""
_KEEP_ALIVE_S = 75
"""Longer than nginx keeps an idle upstream connection (60 s), so that it is never nginx that loses the race."""


def create_app(loaded: Loaded, config: Config, *, pace: Pace | None = None) -> Starlette:
    """The application for a loaded model; its lifespan starts, warms up and ends the engine."""
    return build_app(lambda: loaded, config, pace=pace)


def build_app(load: Callable[[], Loaded], config: Config, *, pace: Pace | None = None) -> Starlette:
    """The application, whose lifespan loads the model too: /live and /health answer meanwhile."""
    service = Service(load, config, pace or Pace())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = Starlette(
        routes=_routes(service),
        middleware=_middleware(service, config.keyring()),
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    return [
        Route("/v1/chat/completions", openai.Generate(service, "chat"), methods=["POST"]),
        Route("/v1/completions", openai.Generate(service, "completion"), methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{name:path}", openai.model),
        Route("/v1/queue", queue_endpoint.queue),
        Route("/health", health.health),
        Route("/live", health.live),
        Route("/metrics", health.exposition),
        Route("/version", health.version),
        Route("/openapi.json", openapi),
        Route("/", health.root),
    ]


def _middleware(service: Service, keys: Keyring) -> list[Middleware]:
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
    if keys:
        stack.append(Middleware(Auth, keys=keys))
    return stack


async def _http_error(_: Request, error: Exception) -> Response:
    """What the router raises: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == WrongMethod.http_status:
        response = error_response(WrongMethod("this path is not served with that method"))
    else:
        response = error_response(NoSuchPath("nothing is served under this path", hint="GET / lists what is"))
    response.headers.update(error.headers or {})
    return response


class _Server(uvicorn.Server):
    """uvicorn, whose first signal drains and whose second one ends."""

    def __init__(self, config: uvicorn.Config, service: Service, manager: Manager) -> None:
        super().__init__(config)
        self._service = service
        self._manager = manager
        self.was_forced = False
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came, in the main thread, between two bytecodes: what it starts is done by `on_tick`."""
        self.was_forced = self.force_exit = self.should_exit = self._is_draining
        self._is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._is_draining:
            self._service.drain()
        self._manager.tell(self._service.state)
        if counter % _TICKS_PER_S == 0:
            self._manager.alive()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends, once everybody who had connected has been answered."""
        for sock in sockets or ():
            listener.stop_accepting(sock)
        if not self.force_exit:
            await asyncio.sleep(_LAST_CALL_S)
        await super().shutdown(sockets)

    def leave(self) -> None:
        """Ends the server; what it still answers is over."""
        self.should_exit = True


def serve(config: Config) -> None:
    """Runs the server until it is told to end; prints the start card once requests are taken.

    Raises ConfigError when the port is taken (before anything is loaded), what `boot.load` raises, and EngineError when
    the engine died or a second signal cut the drain short.
    """
    config.require_safe_host()
    listener = log.set_up(as_json=config.log_json)
    try:
        with _bound(config.host, config.port) as sock:
            _run(config, sock)
    finally:
        listener.stop()


def _run(config: Config, sock: socket.socket) -> None:
    app = build_app(lambda: boot.load(config, progress=_tell), config)
    service: Service = app.state.service
    server = _Server(_uvicorn_config(app), service, Manager(notify_socket()))
    address = _url(sock)
    service.on_end = server.leave
    service.on_ready = lambda loaded: _announce(loaded, address)
    try:
        server.run(sockets=[sock])
    finally:
        service.close()
    if isinstance(service.failure, ChairliftError):
        raise service.failure
    if service.failure is not None:
        raise EngineError(f"the server failed: {service.failure}") from service.failure
    if server.was_forced:
        raise EngineError("ended by a second signal, before all requests were answered")


def _uvicorn_config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LINGER_S,
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _announce(loaded: Loaded, address: str) -> None:
    from rich.console import Console  # not needed before this moment, and slow to import

    Console(stderr=True).print(card.render(loaded, address), crop=False)
    _settle_memory()
    return_large_blocks()
    sys.setswitchinterval(_TURN_S)
    _give_way()


def _give_way() -> None:
    """Lets the event loop, whose thread this is, wait for a free core where it can, instead of pushing the engine off.

    The engine has used up its turn by when it wakes the event loop: it would stand still for as long as that writes.
    The engine's threads began before; those that this one starts later wait as it does. A policy that somebody chose
    stays.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _settle_memory() -> None:
    """Makes the collector of reference cycles rare, and spares it what stays for good.

    It stops every thread while it looks. With Python's defaults a body of a million small lists has it look at nearly
    all of them again and again (330 ms instead of 70), and each full look goes over all of the tokenizer and the code.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _bound(host: str, port: int) -> socket.socket:
    """The listening socket, before anything slow is begun."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # create_server adds the address to strerror, in its own words.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}", hint="choose another --port") from None


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def return_large_blocks() -> None:
    """Keeps large memory blocks out of the C library's heaps; does nothing where that is not glibc.

    Left to itself, glibc moves blocks as large as any that was freed into the heap, where one small block above them
    keeps all: bodies of 20 MB then left the server 100 MB larger, by chance.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
