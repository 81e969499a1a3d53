"""The server's process: signals, the allocator, the scheduling class, and how uvicorn begins and ends.

serve():  bind the port ──> accept (503 loading) ──> ready ──> SIGTERM: drain ──> exit 0
                                                                second signal ──> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from chairlift import boot, card
from chairlift.boot import Loaded
from chairlift.config import Config, notify_socket
from chairlift.errors import ChairliftError, EngineError
from chairlift.server import listener, log
from chairlift.server.app import create_app
from chairlift.server.notify import ServiceManager
from chairlift.server.protocol import Protocol
from chairlift.server.service import Service

LINGER_S = 5
"""After draining, the time that uvicorn gives its connections to close."""
LAST_CALL_S = 0.2
"""Time that a client which connected before the end has to send a request; it is answered with 503 `draining`."""
_TICKS_PER_S = 10
_YOUNG_OBJECTS = 50_000
"""Objects that Python makes before it looks for cycles among them: some 20 MB."""
_LARGE_BYTES = 1 << 20
"""Freed memory blocks of this size go back to the system at once. Bodies of long requests are such blocks."""
_M_MMAP_THRESHOLD = -3
"""mallopt(3)."""
_TURN_S = 0.002
"""How long one thread may keep the interpreter from another. Longer than the engine's Python between two steps (1 ms),
which is then not interrupted; no longer, since the engine may wait for the interpreter this long after each step."""
_KEEP_ALIVE_S = 75
"""Longer than nginx keeps an idle upstream connection (60 s), so that nginx never sends into a closing connection."""


def serve(config: Config) -> None:
    """Runs the server until a signal ends it. Prints the start card once the server is ready.

    Raises ConfigError when the port is taken (before anything is loaded), what `boot.load` raises, and EngineError when
    the engine died or a second signal cut the drain short.
    """
    config.require_safe_host()
    log_writer = log.set_up(as_json=config.log_json)
    try:
        with listener.bind(config.host, config.port) as sock:
            _run(config, sock)
    finally:
        log_writer.stop()


def _run(config: Config, sock: socket.socket) -> None:
    tell = functools.partial(print, file=sys.stderr, flush=True)
    app = create_app(lambda: boot.load(config, progress=tell), config)
    service: Service = app.state.service
    server = _DrainingServer(uvicorn_config(app), service, ServiceManager(notify_socket()))
    address = listener.url_of(sock)
    service.on_end = server.leave
    service.on_ready = lambda loaded: _on_ready(loaded, address)
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


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    """How uvicorn serves the application."""
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
        timeout_graceful_shutdown=LINGER_S,
    )


class _DrainingServer(uvicorn.Server):
    """uvicorn, with a first signal that drains and a second one that ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service, manager: ServiceManager) -> None:
        super().__init__(config)
        self._service = service
        self._manager = manager
        self.was_forced = False
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Notes a signal. Python calls this between two bytecodes of the main thread, so `on_tick` does the work."""
        self.was_forced = self.force_exit = self.should_exit = self._is_draining
        self._is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Starts draining and tells the service manager. uvicorn calls this ten times a second."""
        if self._is_draining:
            self._service.drain()
        self._manager.tell(self._service.state)
        if counter % _TICKS_PER_S == 0:
            self._manager.alive()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, answers the clients that had connected, and ends."""
        for sock in sockets or ():
            listener.stop_accepting(sock)
        if not self.force_exit:
            await asyncio.sleep(LAST_CALL_S)
        await super().shutdown(sockets)

    def leave(self) -> None:
        """Ends the server, once it has no more requests to answer."""
        self.should_exit = True


def _on_ready(loaded: Loaded, address: str) -> None:
    from rich.console import Console  # not needed before this moment, and slow to import

    Console(stderr=True).print(card.render(loaded, address), crop=False)
    calm_garbage_collector()
    return_large_blocks()
    sys.setswitchinterval(_TURN_S)
    _yield_to_engine()


def _yield_to_engine() -> None:
    """Lets the event loop's thread wait for a free core, where there is one, instead of preempting the engine.

    The engine has used up its time slice when it wakes the event loop, and would stand still while the loop writes.
    The policy is that of the calling thread and of threads that start later; the engine's own started before. A policy
    that the operator chose stays.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def calm_garbage_collector() -> None:
    """Makes the search for reference cycles rare, and exempts from it the objects that stay for good.

    A search stops every thread. With Python's defaults, a body of a million small lists is searched again and again
    (330 ms instead of 70), and each full search covers the tokenizer and all code.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def return_large_blocks() -> None:
    """Keeps large memory blocks out of glibc's heaps. Does nothing with another C library.

    After a large block was freed, glibc takes blocks of its size from a heap, where one small block above them keeps
    all of them. Bodies of 20 MB then left the server 100 MB larger, by chance.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
