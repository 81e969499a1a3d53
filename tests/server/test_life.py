"""A server's life: loading, ready, stalled, draining, dead; and the real thing end to end."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from chairlift import boot
from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.errors import ConfigError, EngineError, ModelError
from chairlift.server import listener, log
from chairlift.server.app import create_app
from conftest import TinyGGUF
from support.async_tests import run
from support.in_process_server import (
    CHAT,
    HELLO,
    TEXT,
    Call,
    Gate,
    assert_error,
    client,
    fake_app,
    fake_loaded,
    serving,
    until,
)


def test_a_slow_load_is_not_ready_but_alive() -> None:
    """Fault (CASES C1): ready, or listed, before a token was produced; or no answer at all."""

    async def test() -> None:
        go_on, warming, warm = threading.Event(), threading.Event(), threading.Event()

        def load() -> Loaded:
            assert go_on.wait(20)
            return fake_loaded(slow)

        def slow(_: Any) -> None:
            warming.set()
            assert warm.wait(20)

        async def assert_loading(http: httpx.AsyncClient) -> None:
            answer = await http.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (503, "loading")
            assert (await http.get("/live")).status_code == 200
            assert_error(await http.get("/v1/models"), 503, "loading")
            answer = await http.post(CHAT, json=HELLO)
            assert_error(answer, 503, "loading")
            assert "retry-after" in answer.headers

        app = create_app(load, Config())
        async with app.router.lifespan_context(app), client(app) as http:
            await assert_loading(http)
            go_on.set()
            assert await asyncio.to_thread(warming.wait, 20)
            await assert_loading(http)
            warm.set()
            await app.state.service.settled.wait()
            assert (await http.get("/health")).status_code == 200
            assert (await http.post(CHAT, json=HELLO)).status_code == 200
            assert "warm-up" in app.state.service.serving.loaded.timings

    run(test())


@pytest.mark.parametrize("phase", ["load", "warm-up"])
def test_a_failed_start_ends_the_server(phase: str) -> None:
    """Fault: a server that will never be ready stays up."""

    async def test() -> None:
        ended: list[bool] = []

        def fail(*_: Any) -> Any:
            raise ModelError("no such model")

        app = create_app(fail if phase == "load" else lambda: fake_loaded(fail), Config())
        app.state.service.on_end = lambda: ended.append(True)
        async with app.router.lifespan_context(app), client(app) as http:
            await app.state.service.settled.wait()
            assert ended == [True]
            assert "no such model" in str(app.state.service.failure)
            assert (await http.get("/health")).json()["status"] == "dead"
            assert (await http.get("/live")).status_code == 503
            assert_error(await http.post(CHAT, json=HELLO), 503, "unavailable")

    run(test())


def test_a_stalled_engine_is_not_healthy() -> None:
    """Fault (CASES A14): nothing moves and probes stay green."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, watchdog_s=0.05)
        async with serving(app) as http:
            gate.close()
            call = Call(app, CHAT, HELLO)
            await gate.entered()
            await until(lambda: app.state.service.state == "stalled")
            answer = await http.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
            assert (await http.get("/live")).status_code == 200
            gate.open()
            assert (await call.done()).status == 200
            assert (await http.get("/health")).status_code == 200

    run(test())


def _drainable(app: Starlette) -> list[bool]:
    ended: list[bool] = []
    app.state.service.on_end = lambda: ended.append(True)
    return ended


def test_draining_finishes_what_it_has_begun() -> None:
    """Fault: a restart cuts answers, or takes new ones for ever."""

    async def test() -> None:
        app = fake_app()
        ended = _drainable(app)
        async with serving(app) as http:
            call = Call(app, CHAT, {**HELLO, "stream": True, "max_tokens": 300})
            await call.until(lambda c: len(c.messages) > 3)
            app.state.service.drain()
            app.state.service.drain()
            answer = await http.post(CHAT, json=HELLO)
            assert_error(answer, 503, "draining")
            assert "retry-after" in answer.headers
            assert (await http.get("/health")).json()["status"] == "draining"
            assert (await http.get("/live")).status_code == 200
            await call.done()
            assert call.events[-1] == "[DONE]"
            assert call.events[-2]["choices"][0]["finish_reason"] == "length"
            await until(lambda: ended == [True])

    run(test())


def test_draining_has_an_end() -> None:
    """Fault: one endless answer keeps a server from stopping."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, config=Config(drain_seconds=0.05))
        ended = _drainable(app)
        async with serving(app):
            gate.close()
            call = Call(app, CHAT, {**HELLO, "stream": True, "max_tokens": 400})
            await call.until(lambda c: len(c.messages) > 1)
            app.state.service.drain()
            await call.done()
            assert call.events[-2]["error"]["code"] == "interrupted"
            assert call.events[-1] == "[DONE]"
            await until(lambda: ended == [True])
            gate.open()

    run(test())


def test_a_dead_engine_fails_everybody_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the engine's thread dies and the server goes on taking requests."""

    async def test() -> None:
        monkeypatch.setattr("chairlift.server.service._WATCH_S", 0.01)
        app = fake_app()
        ended = _drainable(app)
        async with serving(app) as http:
            engine = app.state.service.serving.engine
            monkeypatch.setattr(engine._scheduler, "admit", None)
            call = await Call(app, CHAT, {**HELLO, "stream": True}).done()
            assert [("error" in e, e == "[DONE]") for e in call.events[-2:]] == [(True, False), (False, True)]
            await until(lambda: ended == [True])
            assert isinstance(app.state.service.failure, EngineError)
            assert (await http.get("/health")).json()["status"] == "dead"
            assert_error(await http.post(CHAT, json=HELLO), 503, "unavailable")

    run(test())
    assert "the engine thread died" in caplog.text


def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    """Fault: minutes of loading, then a traceback about an address."""
    with listener.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            listener.bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no-such-host"):
        listener.bind("no-such-host.invalid", 0)


def test_the_summary_tells_of_work_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a line every ten seconds of an idle night, or totals in place of rates."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            serving_ = app.state.service.serving
            serving_.work_log.write(serving_.engine.snapshot(), 10.0)
            assert "work " not in caplog.text
            await http.post(TEXT, json={"prompt": "a" * 50, "max_tokens": 20})
            serving_.work_log.write(serving_.engine.snapshot(), 10.0)
            serving_.work_log.write(serving_.engine.snapshot(), 10.0)

    with caplog.at_level(logging.INFO, "chairlift"):
        run(test())
    lines = [record for record in caplog.records if record.getMessage().startswith("work ")]
    (line,) = lines
    fields: dict[str, Any] = line.fields  # type: ignore[attr-defined]
    assert (fields["in_tok_s"], fields["out_tok_s"], fields["running"]) == (5.0, 2.0, 0)


def test_json_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: --log-json writes what no collector can parse."""
    formatter = log.JsonFormatter()
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a %s", ("b\n",), None)
    record.fields = {"id": "r#0", "ttft_s": 0.5}
    line = json.loads(formatter.format(record))
    assert (line["message"], line["id"], line["ttft_s"], line["level"]) == ("a b\n", "r#0", 0.5, "info")


# -- the real thing ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_loaded(tiny_gguf: TinyGGUF) -> Loaded:
    return boot.load(Config(model=str(tiny_gguf(weight_type="Q4_1")), backend="reference", max_num_seqs=4))


def test_a_real_model_answers_alike_alone_and_together(tiny_loaded: Loaded) -> None:
    """Fault: the parts fit their fakes and not each other."""

    async def test() -> None:
        app = create_app(lambda: tiny_loaded, tiny_loaded.config)
        async with serving(app) as http:
            bodies = [
                {
                    "messages": [{"role": "user", "content": f"Question {i}"}],
                    "temperature": t,
                    "seed": i,
                    "max_tokens": 12,
                }
                for i, t in enumerate([0, 1, 0, 1.5])
            ]
            alone = [(await http.post(CHAT, json=body)).json()["choices"] for body in bodies]
            together = await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies))
            assert [answer.json()["choices"] for answer in together] == alone
            streams = [Call(app, CHAT, {**body, "stream": True}) for body in bodies]
            for call, choices in zip(streams, alone, strict=True):
                chunks = [event for event in (await call.done()).events if event != "[DONE]"]
                text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
                assert text == choices[0]["message"]["content"]
            scored = (
                await http.post(TEXT, json={"prompt": "Hello there", "echo": True, "logprobs": 5, "max_tokens": 0})
            ).json()
            logprobs = scored["choices"][0]["logprobs"]
            assert "".join(logprobs["tokens"]) == "Hello there"
            assert all(value < 0 for value in logprobs["token_logprobs"][1:])

    run(test())


def test_signals_end_a_real_process(tiny_gguf: TinyGGUF) -> None:
    """Fault: SIGTERM is not exit 0; a second one waits for answers all the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_gguf(context=8192)), "--port", str(port)]
    process = subprocess.Popen([*command, "--backend", "reference"], stderr=subprocess.PIPE)
    try:
        _wait_until_ready(url, process)
        endless = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + TEXT, json=endless, timeout=30) as stream:
            pieces = stream.iter_raw()  # kept: httpx closes the stream with its iterator
            next(pieces)
            process.send_signal(signal.SIGTERM)
            while httpx.get(url + "/health", timeout=5).json()["status"] != "draining":
                time.sleep(0.01)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 1
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


_FREE_HOLES = """
import resource, sys
from chairlift.server.process import return_large_blocks

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

if sys.argv[1] == "return":
    return_large_blocks()
bytearray(25_000_000)  # freed at once: from here on glibc takes smaller ones from its heap
before = resident_bytes()
bodies, small = [], []
for _ in range(5):
    bodies.append(bytearray(20_000_000))
    for page in range(0, 20_000_000, 4096):
        bodies[-1][page] = 1
    small.append(bytes(200_000))  # right above it: too large for any hole that the imports left
bodies.clear()
print(resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only glibc keeps them")
def test_large_bodies_leave_nothing_behind_in_memory() -> None:
    """The C library's heaps grown by bodies that are gone, by 100 MB here: one small block above them keeps all."""

    def kept(word: str) -> int:
        command = [sys.executable, "-c", _FREE_HOLES, word]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)

    assert kept("return") < 5_000_000
    assert kept("leave") > 15_000_000, "the C library returns them by itself: return_large_blocks() can go"


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")
