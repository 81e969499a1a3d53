"""A server that plays a script of (delay, bytes), and an event loop whose clock jumps, so that every time is exact.

run_virtual(test(...))         an event loop that never waits: its clock jumps to the next timer instead
MockLLM(answer)                answers each request by its number and JSON, over a Unix socket, so that bytes arrive at
                               once and no thread, network or machine changes when
sse(...), delta(...), whole()  bytes of answers
"""

from __future__ import annotations

import asyncio
import json
import selectors
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from chairlift.bench.client.client import Client, Clock
from chairlift.bench.client.target import Target

Script = Sequence[tuple[float, bytes]]
"""What is sent, each after so many seconds."""

T = TypeVar("T")

WALL_START_S = 1_700_000_000.0
"""The wall clock when virtual time is 0."""


# -- time -------------------------------------------------------------------------------------------------------------


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: it adds the timeout to the clock instead, in whole microseconds."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "every task waits for another one, for ever"
        self.now_s = round(self.now_s + max(timeout, 1e-6), 6)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is ready to run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(test: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in virtual time; its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(test)


def virtual_clock() -> Clock:
    """The running virtual loop's time."""
    loop = asyncio.get_running_loop()
    return Clock(now=loop.time, wall=lambda: WALL_START_S + loop.time())


# -- answers ----------------------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def sse(value: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **said: Any) -> bytes:
    """One chunk of a chat."""
    return sse({"choices": [{"index": 0, "delta": said, "finish_reason": finish_reason}]})


ROLE = delta(role="assistant", content="")


def usage(num_output: int, num_prompt: int = 7, num_cached: int | None = None) -> bytes:
    """The chunk with counts."""
    details = {} if num_cached is None else {"prompt_tokens_details": {"cached_tokens": num_cached}}
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, **details}
    return sse({"choices": [], "usage": counts})


def ending(num_output: int, num_prompt: int = 7, num_cached: int | None = None) -> bytes:
    """Finish, counts and [DONE]."""
    return delta("length") + usage(num_output, num_prompt, num_cached) + DONE


def paced(num_tokens: int, first_s: float, gap_s: float, *, num_prompt: int = 7) -> Script:
    """A chat of one token a chunk: role at once, the first token after `first_s`, then one every `gap_s`."""
    return spaced([first_s, *[gap_s] * (num_tokens - 1)], num_prompt=num_prompt)


def spaced(gaps: Sequence[float], *, stamps_from_s: float | None = None, num_prompt: int = 7) -> Script:
    """As `paced`, a token after each of the gaps; with send stamps that begin there, if given."""
    script, at_s = [(0.0, ROLE)], 0.0
    for i, gap_s in enumerate(gaps):
        at_s += gap_s
        value: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": f" {i:04d}"}, "finish_reason": None}]}
        if stamps_from_s is not None:
            value["timestamps"] = {"sent_s": stamps_from_s + at_s}
        script.append((gap_s, sse(value)))
    return [*script, (0.0, ending(len(gaps), num_prompt))]


def whole(num_tokens: int, after_s: float, *, num_prompt: int = 7) -> Script:
    """A chat in one piece."""
    message = {"role": "assistant", "content": " word" * num_tokens}
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    value = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": counts}
    return [(after_s, json.dumps(value).encode())]


# -- what may lie between ---------------------------------------------------------------------------------------------


def _passed_on(moments: Sequence[tuple[float, bytes]]) -> Script:
    """Bytes at moments, as delays."""
    starts = [0.0, *(at_s for at_s, _ in moments)]
    return [(at_s - before, data) for before, (at_s, data) in zip(starts, moments, strict=False)]


def moments(script: Script) -> list[tuple[float, bytes]]:
    """When each piece is sent, from the start."""
    return [(sum(delay for delay, _ in script[: i + 1]), data) for i, (_, data) in enumerate(script)]


def buffered(script: Script, num_bytes: int) -> Script:
    """Passed on by a proxy whenever so many bytes have come, and at the end."""
    passed, held, at_s = [], b"", 0.0
    for at_s, data in moments(script):
        held += data
        while len(held) >= num_bytes:
            passed.append((at_s, held[:num_bytes]))
            held = held[num_bytes:]
    return _passed_on([*passed, (at_s, held)])


def flushed(script: Script, every_s: float) -> Script:
    """Passed on by a proxy at fixed times."""
    held: dict[float, bytes] = {}
    for at_s, data in moments(script):
        due_s = (at_s // every_s + 1) * every_s
        held[due_s] = held.get(due_s, b"") + data
    return _passed_on(sorted(held.items()))


def delayed(script: Script, by_s: float) -> Script:
    """Passed on as it came, later."""
    (first_s, first), *others = script
    return [(first_s + by_s, first), *others]


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A scripted response. The connection is cut before the response's end if `is_cut`."""

    script: Script
    status: int = 200
    content_type: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


def refusal(status: int, message: str = "no", **headers: str) -> Reply:
    """A status with OpenAI's error object."""
    body = json.dumps({"error": {"message": message}}).encode()
    return Reply([(0.0, body)], status, "application/json", headers)


Answering = Callable[[int, dict[str, Any]], Reply | Script]
"""The reply to the n-th POST with that JSON."""


class MockLLM:
    """Plays replies. `pages` are the GET requests that it answers; a page may be a function, called each time."""

    def __init__(self, answer: Answering, pages: dict[str, str | Callable[[], str]] | None = None) -> None:
        self._answer = answer
        self.pages = {"/v1/models": '{"data": [{"id": "mock", "owned_by": "somebody"}]}', **(pages or {})}
        self.page_headers: dict[str, str] = {}
        self.page_status = 200
        self.page_pause_s = 0.0
        """Between the first byte of a page and the rest."""
        self.num_connections = 0
        self.num_left = 0
        """Clients that went away before their answer's end."""
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        self.num_connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except asyncio.IncompleteReadError:
            pass  # between two requests
        except ConnectionError:
            self.num_left += 1
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, version = head[0].split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        if method == "GET":
            reply = self._page(path)
        else:
            request = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.requests.append(request)
            self.paths.append(path)
            self.headers.append(headers)
            made = self._answer(len(self.requests) - 1, request)
            reply = made if isinstance(made, Reply) else Reply(made)
        return await self._play(reply, writer, is_chunked=version == "HTTP/1.1")

    def _page(self, path: str) -> Reply:
        page = self.pages.get(path)
        text = page() if callable(page) else page
        if text is None:
            return refusal(404)
        pieces = [(0.0, text[:1].encode()), (self.page_pause_s, text[1:].encode())]
        return Reply(pieces, self.page_status, "application/json", self.page_headers)

    async def _play(self, reply: Reply, writer: asyncio.StreamWriter, *, is_chunked: bool) -> bool:
        """As servers do: in chunks, but to HTTP/1.0 (nginx unless told otherwise) until the connection's end."""
        framing = {"transfer-encoding": "chunked"} if is_chunked else {"connection": "close"}
        headers = {"content-type": reply.content_type, **framing, **reply.headers}
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for delay_s, data in reply.script:
            if delay_s:
                await asyncio.sleep(delay_s)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            await writer.drain()
        if is_chunked and not reply.is_cut:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return is_chunked and not reply.is_cut

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listens on a Unix socket; gives its path."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "llm")
            async with await asyncio.start_unix_server(self.handle, path, backlog=1000):
                yield path

    @asynccontextmanager
    async def client(
        self, target: Target | None = None, clock: Clock | None = None, **options: Any
    ) -> AsyncIterator[Client]:
        """A client of it, in the running loop's time."""
        async with self.serving() as path:
            connector = aiohttp.UnixConnector(path, limit=0)
            chosen = target or Target("http://mock", "mock")
            async with Client(chosen, clock=clock or virtual_clock(), connector=connector, **options) as client:
                yield client


@asynccontextmanager
async def tcp(mock: MockLLM) -> AsyncIterator[str]:
    """The same server on a port, in real time; gives its URL."""
    async with await asyncio.start_server(mock.handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
