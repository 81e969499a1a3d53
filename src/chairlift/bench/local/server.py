"""A server that a measurement starts: `chairlift serve` as a process of its own, and what its log says.

    start ──> "serving on http://..." ──> measure ──> SIGTERM ──> a short drain ──> gone
                                             └── also after an error or Ctrl-C ─────────┘

The server gets only the settings that are named here, and none of the environment's CHAIRLIFT_ variables. It runs in a
session of its own, so that a Ctrl-C reaches the measurement alone, which then ends the server.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from chairlift import config
from chairlift.bench.client.client import Client
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import GenerationRequest
from chairlift.errors import ChairliftError

START_S = 300.0
"""The longest start, in seconds: a large model on a slow disk."""
END_S = 10.0
_DRAIN_S = 1
_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A finished request by the engine's own clock, from the server's log. Times in seconds."""

    id: str
    queue_s: float
    prefill_s: float  # from its first step to its first token
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request to send `at_s` seconds after the client's start."""

    name: str
    prompt: str
    num_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """A request as its client saw it and as the engine did; `logged` is None without a log line."""

    request: TimedRequest
    sample: Sample
    logged: LoggedRequest | None


@dataclass
class LocalServer:
    """A server that is ready."""

    url: str
    ready_s: float  # from the start of the process
    pid: int
    finished: list[LoggedRequest] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def observe(
        self, client: Client, request: TimedRequest, request_id: str, *, index: int = 0
    ) -> ObservedRequest:
        """Sends a request when it is due, and waits for its answer and its log line."""
        await asyncio.sleep(max(0.0, request.at_s - client.clock.now_s()))
        asked = GenerationRequest(request.prompt, request.num_tokens, request_id=request_id)
        sample = await client.ask(asked, index=index, scheduled_s=request.at_s)
        was_served = sample.is_ok or bool(sample.events)
        return ObservedRequest(request, sample, await self.logged(request_id) if was_served else None)

    async def logged(self, request_id: str, timeout_s: float = 5.0) -> LoggedRequest | None:
        """The log line of a request that was sent with this `X-Request-Id`; None if none comes."""
        end_s = time.monotonic() + timeout_s
        while True:
            for request in self.finished:
                # The endpoint's prefix, the client's id, the server's own part (clients repeat theirs), the choice.
                if re.fullmatch(rf"\w+-{re.escape(request_id)}-[0-9a-f]+#0", request.id):
                    return request
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), end_s - time.monotonic())
            except TimeoutError:
                return None

    def read(self, line: str) -> None:
        """Takes a line of the log. Lines of other kinds are ignored."""
        try:
            value = json.loads(line)
            if value["event"] == "request":
                times = float(value["queue_s"]), float(value["prefill_s"])
                counts = int(value["output_tokens"]), int(value["preemptions"])
                self.finished.append(LoggedRequest(str(value["id"]), *times, *counts))
                self._came.set()
        except (ValueError, KeyError, TypeError):
            return


def command(model: str, cache_dir: str, flags: Sequence[str]) -> list[str]:
    """The command line of a server on any free port."""
    fixed = ["--cache-dir", cache_dir, "--port", "0", "--log-json", "--drain-seconds", str(_DRAIN_S)]
    return [sys.executable, "-m", "chairlift", "serve", model, *fixed, *flags]


@asynccontextmanager
async def serving(model: str | None, *flags: str) -> AsyncIterator[LocalServer]:
    """Starts a server, waits until it is ready, and ends it. If it fails, ChairliftError has the last lines of its log.

    `model` is a name or a path as `chairlift serve` takes them; None is the default.
    """
    settings = config.load({"model": model})
    start_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command(settings.model, str(settings.cache_dir), flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=config.environment_without_settings(),
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    assert process.stderr is not None
    reader: asyncio.Task[None] | None = None
    try:
        url = await asyncio.wait_for(_until_ready(process.stderr), START_S)
        server = LocalServer(url, time.monotonic() - start_s, process.pid)
        reader = asyncio.create_task(_follow(process.stderr, server))
        yield server
    finally:
        await _end(process)
        if reader is not None:
            await reader


async def _until_ready(stderr: asyncio.StreamReader) -> str:
    """The address on its start card. Raises ChairliftError if the process ends first."""
    last: deque[str] = deque(maxlen=12)
    async for raw in stderr:
        line = raw.decode(errors="replace").rstrip()
        if found := re.match(r"serving on (http://\S+)", line):
            return found[1]
        last.append(line)
    raise ChairliftError("the server ended before it was ready:\n  " + "\n  ".join(last))


async def _follow(stderr: asyncio.StreamReader, server: LocalServer) -> None:
    """Reads the log to its end, so that the server never waits for a reader."""
    async for raw in stderr:
        server.read(raw.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Sends SIGTERM, again to cut the drain short, and then SIGKILL."""
    for last_resort in (process.terminate, process.terminate, process.kill):
        if process.returncode is not None:
            return
        try:
            last_resort()
            await asyncio.wait_for(process.wait(), END_S)
        except (TimeoutError, ProcessLookupError):
            continue
