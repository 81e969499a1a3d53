"""What a server does when its parts fail: the engine dies or stalls, the tokenizer breaks, memory is short."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest

from chairlift.errors import EngineError
from chairlift.server.service import MAX_PREPARING
from support import dying_server
from support.async_tests import run
from support.in_process_server import (
    CHAT,
    HELLO,
    TEXT,
    Call,
    Gate,
    assert_error,
    fake_app,
    fake_loaded,
    is_at_rest,
    metric,
    parse_events,
    serving,
    until,
)


def test_a_process_whose_engine_dies_exits_with_an_error() -> None:
    """Fault: the engine's thread is gone and the process stays up, or ends as if all were well, or a client hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "support.dying_server", "serve", "fake", "--port", str(port)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            _wait_until_ready(url, process)
            body = {"prompt": "a" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
            answer = httpx.post(url + TEXT, json=body, timeout=30)
            assert process.stderr is not None
            said = process.stderr.read()
            status = process.wait(20)
        finally:
            process.kill()
    events = parse_events(answer.content)
    assert [events[-2]["error"]["code"], events[-1]] == ["engine_error", "[DONE]"]
    assert len("".join(event["choices"][0]["text"] for event in events[:-2])) == dying_server.DEADLY - 50 + 1
    assert status == 1
    assert "the engine has died" in said.splitlines()[-1]


def _wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")


def test_an_engine_that_dies_while_draining_is_no_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: answers are lost during a restart, and the exit status says that none were."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate)
        service = app.state.service
        ended: list[bool] = []
        service.on_end = lambda: ended.append(True)
        async with serving(app) as http:
            gate.close()
            call = Call(app, CHAT, HELLO)
            await gate.entered()
            service.drain()
            monkeypatch.setattr(service.serving.engine._scheduler, "admit", None)
            gate.open()
            assert_error(await call.done(), 500, "engine_error")
            await until(lambda: ended == [True])
            assert isinstance(service.failure, EngineError)
            assert (await http.get("/health")).json()["status"] == "dead"

    run(test())


def test_a_death_is_noticed_whatever_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a bug in the summary line ends the task that would have noticed that the engine died."""

    async def test() -> None:
        monkeypatch.setattr("chairlift.server.service._WATCH_S", 0.01)
        monkeypatch.setattr("chairlift.server.service._SUMMARY_S", 0.0)
        app = fake_app()
        service = app.state.service
        async with serving(app) as http:
            tried: list[object] = []

            def fail(*given: object) -> None:
                tried.append(given)
                raise RuntimeError("broken")

            monkeypatch.setattr(service.serving.work_log, "write", fail)
            await until(lambda: len(tried) > 2)
            monkeypatch.setattr(service.serving.engine._scheduler, "admit", None)
            assert_error(await http.post(CHAT, json=HELLO), 500, "engine_error")
            await until(lambda: service.failure is not None)

    run(test())


def test_a_stall_is_told_once_with_the_stacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault (CASES A14): a server hangs and leaves nothing to find out why; or fills the disk with its stacks."""

    async def test() -> None:
        monkeypatch.setattr("chairlift.server.service._WATCH_S", 0.01)
        gate = Gate()
        app = fake_app(gate, watchdog_s=0.05)
        async with serving(app) as http:
            assert metric(app, 'stalls_total{model_name="fake"}') == 0
            for num_stalls in (1, 2):
                gate.close()
                call = Call(app, CHAT, HELLO)
                await until(lambda n=num_stalls: metric(app, 'stalls_total{model_name="fake"}') == n)  # type: ignore[misc]
                answer = await http.get("/health")
                assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
                gate.open()
                await call.done()
                assert (await http.get("/health")).status_code == 200

    run(test())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stalled: ")]
    assert len(told) == 2
    first = told[0].split("thread ")[1]
    assert first.startswith("chairlift-engine:")
    assert "in_process_server.py" in first, "where it hangs"
    assert "thread MainThread:" in told[0]
    assert "1 running and 0 waiting" in told[0]


def test_a_tokenizer_that_fails_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a tokenizer's error leaves a request without answer, a neighbour without its text, or a count too high."""

    async def test() -> None:
        loaded = fake_loaded()
        encode = loaded.tokenizer.encode

        def broken(text: str, **options: bool) -> list[int]:
            if "poison" in text:
                raise RuntimeError("broken tokenizer")
            return encode(text, **options)

        monkeypatch.setattr(loaded.tokenizer, "encode", broken)
        app = fake_app(loaded=loaded)
        async with serving(app) as http:
            alone = (await http.post(CHAT, json=HELLO)).json()["choices"]
            beside = Call(app, CHAT, HELLO)
            for stream in (False, True):
                body = {"messages": [{"role": "user", "content": "poison"}], "stream": stream}
                error = assert_error(await http.post(CHAT, json=body), 500, "internal_error")
                assert "broken tokenizer" not in str(error), "internals are not told"
            assert (await beside.done()).json["choices"] == alone
            await until(lambda: is_at_rest(app))
            assert app.state.service._preparing._value == MAX_PREPARING

    run(test())


def test_preemptions_are_told_in_usage_log_and_metric(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: answers take twice as long and nothing says that memory was short."""

    async def test() -> None:
        app = fake_app(num_blocks=16, max_model_len=256, max_num_seqs=4, notes=("slots exceed memory",))
        bodies = [{"prompt": f"{i}" * 30, "max_tokens": 100, "ignore_eos": True, "temperature": 0} for i in range(4)]
        async with serving(app) as http:
            calls = [Call(app, TEXT, body) for body in bodies]
            answers = [(await call.done()).json for call in calls]
            total = metric(app, 'num_preemptions_total{model_name="fake"}')
            health = (await http.get("/health")).json()
        assert total > 0
        assert sum(answer["usage"]["num_preemptions"] for answer in answers) == total
        assert (health["num_preemptions"], health["notes"]) == (total, ["slots exceed memory"])

    with caplog.at_level(logging.INFO, "chairlift"):
        run(test())
    fields = [record.fields for record in caplog.records if record.getMessage().startswith("request ")]  # type: ignore[attr-defined]
    assert len(fields) == 4
    warnings = [r for r in caplog.records if "the KV pool is full" in r.getMessage()]
    assert warnings
    assert {r.levelno for r in warnings} == {logging.WARNING}
    assert sum(f["preemptions"] for f in fields) > 0
