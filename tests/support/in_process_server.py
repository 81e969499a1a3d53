"""A server without weights or sockets: the fake model with the real engine and the real application.

async with serving(app): ...        runs the lifespan and waits until the server is ready
Call(app, path, json)               one request; the test decides when its client reads, waits or leaves
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.applications import Starlette

from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.kernels.backend import BackendFacts, MemoryView
from chairlift.kernels.ops import StepArrays
from chairlift.models.checkpoint import GenerationDefaults
from chairlift.models.gguf.vocabulary import read_tokenizer
from chairlift.models.templates.chat_template import ChatTemplate
from chairlift.server.app import create_app
from chairlift.server.sse import Pace
from support.fake_model import FakeModel, fake_plan, fake_spec
from support.tiny_gguf import CHATML, tokenizer_metadata

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
"""A small chat request, greedy and so with one right answer."""


def fake_loaded(
    before_run: Callable[[Any], None] | None = None,
    *,
    template: str | None = CHATML,
    add_bos: bool = False,
    **plan: Any,
) -> Loaded:
    """The fake model with a real byte-level tokenizer; any field of its plan can be set."""
    tokenizer = read_tokenizer(tokenizer_metadata(add_bos=add_bos))
    resolved = fake_plan(**plan)
    return Loaded(
        config=Config(),
        plan=resolved,
        spec=fake_spec(),
        tokenizer=tokenizer,
        template=None if template is None else ChatTemplate(template, tokenizer.special_tokens),
        model=FakeModel(resolved.num_blocks, before_run=before_run),
        generation=GenerationDefaults(),
        backend=BackendFacts("no arithmetic", "none-a8", {}, {}),
        memory=MemoryView(2**30, "the machine", ""),
        names=("fake", "alias"),
        num_parameters=1,
        read_bytes=1,
        bandwidth=1.0,
    )


def fake_app(
    before_run: Callable[[Any], None] | None = None,
    *,
    config: Config | None = None,
    pace: Pace | None = None,
    loaded: Loaded | None = None,
    **plan: Any,
) -> Starlette:
    """The application on the fake model."""
    model = loaded or fake_loaded(before_run, **plan)
    return create_app(lambda: model, config or Config(), pace=pace)


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """Runs the application's lifespan, and gives a client once the server is ready."""
    async with app.router.lifespan_context(app):
        await app.state.service.settled.wait()
        async with client(app) as http:
            yield http


def client(app: Starlette) -> httpx.AsyncClient:
    """A client without a socket. It sees a response only when that is complete; use Call to watch a stream."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def official_client(http: httpx.AsyncClient) -> AsyncOpenAI:
    """OpenAI's own package, talking to the application."""
    transport: Any = http  # annotated as one kind of client; the code takes either
    return AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=transport, max_retries=0)


class Call:
    """One request, driven message by message."""

    def __init__(self, app: Any, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
        }
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.messages: list[dict[str, Any]] = []
        self.reads = asyncio.Event()  # while cleared, `send` blocks as on a full socket
        self.reads.set()
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(app(self.scope, self._inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.messages.append(message)
        self._changed.set()

    def disconnect(self) -> None:
        """Makes the client leave."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[Call], bool]) -> None:
        """Waits until the messages sent so far satisfy a condition."""
        async with asyncio.timeout(20):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def done(self) -> Call:
        """Waits for the end of the request."""
        async with asyncio.timeout(20):
            await self.task
        return self

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """The events of a stream in order: JSON values and "[DONE]", without comments."""
    blocks = body.decode("ascii").split("\n\n")
    assert blocks.pop() == "", "every event ends with an empty line"
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


class Gate:
    """A gate in front of each step, which holds the engine while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._entered = threading.Event()
        self.error: Exception | None = None
        self.close_at: Callable[[StepArrays], bool] | None = None  # closes the gate before a step, once
        self.open()

    def __call__(self, step: StepArrays) -> None:
        if self.close_at is not None and self.close_at(step):
            self.close()
            self.close_at = None
        self._entered.set()
        assert self._open.wait(30)
        if self.error is not None:
            raise self.error

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._entered.clear()
        self._open.clear()

    async def entered(self) -> None:
        """Waits until the engine stands at the closed gate."""
        assert await asyncio.to_thread(self._entered.wait, 20)


async def until(condition: Callable[[], bool]) -> None:
    """Polls for what the engine thread does."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def metric(app: Starlette, name: str) -> float:
    text = app.state.service.serving.metrics.exposition().decode()
    values = re.findall(rf"^{re.escape('chairlift:' + name)} (\S+)$", text, re.MULTILINE)
    assert len(values) == 1, name
    return float(values[0])


def cancelled(app: Starlette, phase: str) -> float:
    return metric(app, f'requests_cancelled_total{{model_name="fake",phase="{phase}"}}')


def num_awaited(app: Starlette) -> int:
    """Choices whose output an HTTP request waits for."""
    return len(app.state.service._dispatch._waiting)


def is_at_rest(app: Starlette) -> bool:
    now = app.state.service.snapshot()
    return (now.num_running, now.num_waiting, now.num_used_blocks) == (0, 0, 0)


def shape(event: Any) -> str:
    """The kind of an event, in one word."""
    if event == "[DONE]":
        return "done"
    if "error" in event:
        return "error"
    if not event["choices"]:
        return "usage"
    (choice,) = event["choices"]
    if choice["finish_reason"] is not None:
        assert choice.get("delta", {}) == {}
        assert choice.get("text", "") == ""
        return str(choice["finish_reason"])
    if "text" in choice:
        return "content"
    return "role" if "role" in choice["delta"] else "content"


def chat_text(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in choices)


def assert_error(answer: httpx.Response | Call, status: int, code: str) -> dict[str, Any]:
    """Checks status, headers and body of an error. Returns its detail."""
    body = answer.json if isinstance(answer, Call) else answer.json()
    assert (answer.status if isinstance(answer, Call) else answer.status_code) == status
    assert answer.headers["content-type"] == "application/json"
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == code
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error
