"""Servers that a measurement starts for itself: `chairlift serve` as a process of its own, and what its log says.

    start ──> "serving on http://..." ──> measure ──> SIGTERM ──> a short drain ──> gone
                                             └── whatever happens, Ctrl-C too ──────────┘

A server gets only the settings that are named here: the environment's CHAIRLIFT_ variables stay outside. It runs in a
session of its own, so that a Ctrl-C reaches the measurement alone, which then ends it.
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
from typing import Any

from chairlift import config
from chairlift.errors import ChairliftError

START_S = 300.0
"""Most that a start may take: a large model is read from a slow disk."""
END_S = 10.0
_DRAIN_S = 1
_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request by the engine's own clock, from the server's log. Times in seconds."""

    id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float
    prefill_s: float  # from its first step to its first token
    ttft_s: float  # both together
    e2e_s: float
    num_preemptions: int
    end: str

    @classmethod
    def parse(cls, line: dict[str, Any]) -> Record:
        """From the fields of a log line."""
        return cls(
            id=str(line["id"]),
            num_prompt_tokens=int(line["prompt_tokens"]),
            num_cached_tokens=int(line["cached_tokens"]),
            num_output_tokens=int(line["output_tokens"]),
            queue_s=float(line["queue_s"]),
            prefill_s=float(line["prefill_s"]),
            ttft_s=float(line["ttft_s"]),
            e2e_s=float(line["e2e_s"]),
            num_preemptions=int(line["preemptions"]),
            end=str(line["end"]),
        )


@dataclass
class LocalServer:
    """A server that is ready."""

    url: str
    ready_s: float  # from the start of the process
    pid: int
    records: list[Record] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def record(self, request_id: str, timeout_s: float = 5.0) -> Record | None:
        """The engine's word on a request that was sent with this `X-Request-Id`; None when none comes."""
        end_s = time.monotonic() + timeout_s
        while True:
            for record in self.records:
                # The endpoint's prefix, the client's id, the server's own part (clients repeat theirs), the choice.
                if re.fullmatch(rf"\w+-{re.escape(request_id)}-[0-9a-f]+#0", record.id):
                    return record
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), end_s - time.monotonic())
            except TimeoutError:
                return None

    def read(self, line: str) -> None:
        """A line of its log; whatever is no request's is passed over."""
        try:
            value = json.loads(line)
            if value["event"] == "request":
                self.records.append(Record.parse(value))
                self._came.set()
        except (ValueError, KeyError, TypeError):
            return


def command(model: str, cache_dir: str, flags: Sequence[str]) -> list[str]:
    """How it is started. The port is any that is free."""
    fixed = ["--cache-dir", cache_dir, "--port", "0", "--log-json", "--drain-seconds", str(_DRAIN_S)]
    return [sys.executable, "-m", "chairlift", "serve", model, *fixed, *flags]


@asynccontextmanager
async def serving(model: str | None, *flags: str) -> AsyncIterator[LocalServer]:
    """Starts a server, waits until it is ready, and ends it. Raises ChairliftError with its last words when it fails.

    `model` is a name or a path as `chairlift serve` takes them, None for the default.
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
    """The address that its start card names; ChairliftError when it ends before."""
    last: deque[str] = deque(maxlen=12)
    async for raw in stderr:
        line = raw.decode(errors="replace").rstrip()
        if found := re.match(r"serving on (http://\S+)", line):
            return found[1]
        last.append(line)
    raise ChairliftError("the server ended before it was ready:\n  " + "\n  ".join(last))


async def _follow(stderr: asyncio.StreamReader, server: LocalServer) -> None:
    """Reads to the end, so that the server never waits for its log."""
    async for raw in stderr:
        server.read(raw.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, once more to cut its drain short, and then SIGKILL."""
    for last_resort in (process.terminate, process.terminate, process.kill):
        if process.returncode is not None:
            return
        try:
            last_resort()
            await asyncio.wait_for(process.wait(), END_S)
        except (TimeoutError, ProcessLookupError):
            continue
