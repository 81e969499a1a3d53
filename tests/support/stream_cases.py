"""Streams to the byte: every way in which a stream can end, and the file that records it.

`PYTHONPATH=tests python -m support.stream_cases` writes tests/fixtures/streams. Read the diff as a client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from chairlift.config import Config
from support.in_process_server import CHAT, TEXT, Call
from support.paths import FIXTURES
from support.scripted_model import EOS, Script, Scripted

FOLDER = FIXTURES / "streams"

USAGE = {"stream_options": {"include_usage": True}}
HELLO: Script = [*b"Hi", 256, *"é".encode(), EOS]  # 256 is " t"


def broken() -> int:
    """A token whose computation fails."""
    raise ValueError("broken kernel")


@dataclass(frozen=True)
class Case:
    """One stream: the request, the model's output, and whether the server ends it."""

    scripts: Sequence[Script] = (HELLO,)
    body: dict[str, Any] = field(default_factory=dict)
    end: str = ""  # "drain" or "stop": what the server does once the model makes no more tokens
    chat_body: dict[str, Any] = field(default_factory=dict)
    text_body: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "stop": Case(),
    "length": Case(body={"max_tokens": 3}),
    "no-text": Case(scripts=[[EOS]]),
    "stop-string": Case(body={"stop": ["i té"]}),
    "half-a-stop-string": Case(body={"stop": ["té!"]}),
    "half-a-character": Case(scripts=[[*b"a\xc3", EOS]]),
    "usage": Case(body=USAGE),
    "warnings": Case(body={"num_ctx": 4096}),
    "two-choices": Case(scripts=[[*b"one", EOS], [*b"x", EOS]], body={"n": 2, **USAGE}),
    "logprobs": Case(
        scripts=[[*b"A\xc3\xa9", EOS]],
        chat_body={"logprobs": True, "top_logprobs": 2},
        text_body={"logprobs": 2, "echo": True},
    ),
    "timestamps": Case(body={"stream_options": {"include_usage": True, "include_timestamps": True}}),
    "error-first": Case(scripts=[[broken]], body=USAGE),
    "error-later": Case(scripts=[[*b"Hi", broken]], body=USAGE),
    "error-in-one-choice": Case(scripts=[[*b"Hi", EOS], [*b"H", broken]], body={"n": 2}),
    "drained": Case(scripts=[[*b"Hi"]], body={**USAGE, "max_tokens": 3}, end="drain"),
    "ended-by-server": Case(scripts=[[*b"Hi"]], body={"ignore_eos": True}, end="stop"),
}
NAMES = [f"{kind}-{name}" for name in CASES for kind in ("chat", "text")]


def request_of(name: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a case."""
    kind, _, case_name = name.partition("-")
    case = CASES[case_name]
    common = {"stream": True, "max_tokens": 20, **case.body}
    if kind == "chat":
        return CHAT, {"messages": [{"role": "user", "content": "Say it"}], **common, **case.chat_body}
    return TEXT, {"prompt": "Say", **common, **case.text_body}


def recorded(name: str) -> bytes:
    """The bytes that the server sends, with a fixed id, time and version."""
    case = CASES[name.partition("-")[2]]
    silent, go_on = threading.Event(), threading.Event()

    def late() -> int:
        silent.set()
        assert go_on.wait(30)
        return ord("!")

    scripts = [[*script, late] if case.end else script for script in case.scripts]
    with _pinned(), Scripted(config=Config(drain_seconds=0.02), lockstep=True) as server:
        server.say(*scripts)
        return server.run(_recorded(server, name, case.end, (silent, go_on)))


async def _recorded(server: Scripted, name: str, end: str, gate: tuple[threading.Event, threading.Event]) -> bytes:
    path, body = request_of(name)
    call = Call(server.app, path, body, headers={"x-request-id": "golden"})
    service = server.app.state.service
    silent, go_on = gate
    if end:
        assert await asyncio.to_thread(silent.wait, 30)
    if end == "drain":
        service.drain()
        await call.until(lambda c: c.body.endswith(b"[DONE]\n\n"))
    engine = service.serving.engine
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop)) if end == "stop" else None
    while stopping is not None and not engine._life.is_stopping:
        await asyncio.sleep(0)
    go_on.set()
    await call.done()
    if stopping is not None:
        await stopping
    return call.body


@contextlib.contextmanager
def _pinned() -> Iterator[None]:
    clock = SimpleNamespace(time=lambda: 1700000000.25)
    with (
        mock.patch("chairlift.server.answer.time", clock),
        mock.patch("chairlift.server.dispatch.time", clock),
        mock.patch("chairlift.server.sse.time", clock),
        mock.patch("chairlift.boot.__version__", "0"),
        mock.patch("chairlift.server.openai.secrets", SimpleNamespace(token_hex=lambda _: "1")),
    ):
        yield


def path_of(name: str) -> Path:
    """The file of a case."""
    return FOLDER / f"{name}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        path_of(name).write_bytes(recorded(name))
