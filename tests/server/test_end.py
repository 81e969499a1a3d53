"""Every way a request can end: failures, refusals, clients that leave or read slowly; and its line in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import openai
import pytest

from chairlift.config import Config
from chairlift.errors import EngineError
from chairlift.keys import ApiKey
from chairlift.server.sse import Pace
from support.async_tests import run
from support.in_process_server import (
    CHAT,
    HELLO,
    Call,
    Gate,
    cancelled,
    chat_text,
    fake_app,
    is_at_rest,
    num_awaited,
    official_client,
    parse_events,
    serving,
    shape,
    until,
)

STREAM = {**HELLO, "stream": True}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_error_before_the_headers_is_json() -> None:
    """Fault (CASES B10): a bad request is answered 200 with the error in the stream."""

    async def test() -> None:
        app = fake_app()
        async with serving(app):
            call = await Call(app, CHAT, {**STREAM, "messages": [{"role": "user", "content": "a" * 600}]}).done()
            assert call.status == 400
            assert call.headers["content-type"] == "application/json"
            assert call.json["error"]["code"] == "context_length_exceeded"

    run(test())


def test_an_error_mid_stream_is_an_error_event_and_done() -> None:
    """Fault (CASES B5, B11): a broken stream looks finished, or never ends."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate)
        async with serving(app) as http:
            call = Call(app, CHAT, {**WITH_USAGE, "max_tokens": 400})
            await call.until(lambda c: len(c.messages) > 3)
            gate.close()
            gate.error = ValueError("broken kernel")
            gate.open()
            await call.done()
            kinds = [shape(event) for event in call.events]
            assert kinds == ["role", *["content"] * (len(kinds) - 3), "error", "done"]
            error = call.events[-2]["error"]
            assert error["code"] == "engine_error"
            assert isinstance(error["message"], str)
            gate.error = None
            await until(lambda: is_at_rest(app))
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    run(test())


def test_an_error_of_a_whole_answer_is_a_500() -> None:
    """Fault: an engine error leaves a client without answer."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate)
        async with serving(app) as http:
            gate.error = ValueError("broken kernel")
            answer = await http.post(CHAT, json={**HELLO, "n": 2})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
            gate.error = None
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    run(test())


def test_the_official_client_raises_on_an_error_event() -> None:
    """Fault (CASES B11): the error event is of a shape that clients overlook."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            service = app.state.service
            broken = EngineError("broken in the middle")
            client = official_client(http)
            messages: Any = HELLO["messages"]

            async def read() -> None:
                stream = await client.chat.completions.create(
                    model="fake", messages=messages, stream=True, extra_body={"ignore_eos": True}
                )
                async for chunk in stream:
                    assert chunk.choices[0].finish_reason is None

            task = asyncio.create_task(read())
            await until(lambda: num_awaited(app) > 0)
            service._dispatch.fail_all(broken)
            with pytest.raises(openai.APIError, match="broken in the middle"):
                await task
            await until(lambda: is_at_rest(app))

    run(test())


def test_a_bug_while_streaming_ends_the_stream_in_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: an exception of ours cuts the connection, or its text reaches the client."""

    async def test() -> None:
        app = fake_app()
        async with serving(app):
            monkeypatch.setattr("chairlift.server.answer.ChatBuilder.chunks", None)
            call = await Call(app, CHAT, STREAM).done()
            assert [shape(event) for event in call.events] == ["role", "error", "done"]
            assert "internal error" in call.events[1]["error"]["message"]
            await until(lambda: is_at_rest(app))

    run(test())
    assert "its stream failed" in caplog.text


def test_queue_full_is_refused_at_once() -> None:
    """Fault (CASES A15, A16): requests wait without bound, or are refused with a 500."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=1, max_queue=1)
        async with serving(app) as http:
            gate.close()
            first = Call(app, CHAT, HELLO)
            await gate.entered()
            second = Call(app, CHAT, HELLO)
            await until(lambda: app.state.service.snapshot().num_waiting == 1)
            answer = await http.post(CHAT, json=STREAM)
            assert answer.status_code == 503
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert (error["code"], error["waiting"], error["running"]) == ("queue_full", 1, 1)
            gate.open()
            assert [(await call.done()).status for call in (first, second)] == [200, 200]

    run(test())


# -- clients that leave -----------------------------------------------------------------------------------------------

LONG = {"messages": [{"role": "user", "content": "a" * 100}], "temperature": 0, "max_tokens": 200}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_is_noticed_in_every_phase(phase: str, stream: bool) -> None:
    """Fault (CASES A26, B15, B16): generation goes on for nobody, or a neighbour's ends with it."""

    async def test() -> None:
        gate = Gate()
        config = Config(api_key=(ApiKey.parse("sesame-open"),), cors_origin=("*",))
        app = fake_app(gate, config=config, max_num_seqs=2 if phase != "queued" else 1, max_num_batched_tokens=16)
        headers = {"authorization": "Bearer sesame-open", "origin": "http://page"}
        async with serving(app) as http:
            alone = (await http.post(CHAT, json=HELLO, headers=headers)).json()["choices"]
            if phase != "decode":
                gate.close()
            neighbour = Call(app, CHAT, HELLO, headers=headers)
            if phase == "queued":
                await gate.entered()
            leaver = Call(app, CHAT, {**LONG, "stream": stream}, headers=headers)
            service = app.state.service
            if phase == "queued":
                await until(lambda: service.snapshot().num_waiting == 1)
            elif phase == "prefill":
                await until(lambda: num_awaited(app) == 2)
                gate.close_at = lambda step: len(step.seq_starts) == 3 and len(step.tokens) > 2
                gate.open()
                await until(lambda: gate.close_at is None)
                await gate.entered()
            else:
                gate.close_at = lambda step: len(step.tokens) <= 2 and step.positions.max() > 150
                await until(lambda: gate.close_at is None)
                await gate.entered()
            leaver.disconnect()
            await leaver.done()
            gate.open()
            await neighbour.done()
            assert neighbour.json["choices"] == alone
            await until(lambda: is_at_rest(app) and cancelled(app, phase) == 1)
            assert b"[DONE]" not in leaver.body

    run(test())


def test_a_client_that_leaves_while_its_prompt_is_read() -> None:
    """Fault: the work of a worker thread is submitted for a client that has gone."""

    async def test() -> None:
        app = fake_app()
        async with serving(app):
            service = app.state.service
            encoding, go_on = threading.Event(), threading.Event()
            tokenizer = service.serving.loaded.tokenizer
            encode = tokenizer.encode

            def slow(text: str, **options: Any) -> list[int]:
                encoding.set()
                assert go_on.wait(20)
                return list(encode(text, **options))

            tokenizer.encode = slow
            steps = service.snapshot().num_steps
            call = Call(app, CHAT, STREAM)
            assert await asyncio.to_thread(encoding.wait, 20)
            call.disconnect()
            await call.done()
            go_on.set()
            assert call.messages == []
            assert cancelled(app, "preparing") == 1
            assert service.snapshot().num_steps == steps

    run(test())


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    """Fault: half a body is parsed, or logged as a failure."""

    async def test() -> None:
        app = fake_app()
        async with serving(app):
            call = Call(app, CHAT, STREAM)
            call._inbox.get_nowait()
            call._inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
            call.disconnect()
            await call.done()
            assert call.messages == []

    run(test())


def test_a_slow_reader_delays_nobody_and_loses_nothing() -> None:
    """Fault: unsent text piles up as events, or one full socket stops the others."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            slow = Call(app, CHAT, {**WITH_USAGE, "max_tokens": 300})
            await slow.until(lambda c: len(c.messages) >= 2)
            slow.reads.clear()
            whole = (await http.post(CHAT, json={**HELLO, "max_tokens": 300})).json()["choices"][0]["message"][
                "content"
            ]
            await until(lambda: is_at_rest(app))
            slow.reads.set()
            await slow.done()
            assert chat_text(slow.events) == whole
            assert slow.events[-2]["usage"]["completion_tokens"] == 300

    run(test())


def test_a_reader_that_stands_still_is_let_go() -> None:
    """Fault: a dead peer holds its slot for ever."""

    async def test() -> None:
        app = fake_app(pace=Pace(stall_s=0.05), max_num_seqs=1)
        async with serving(app) as http:
            slow = Call(app, CHAT, {**STREAM, "max_tokens": 400})
            await slow.until(lambda c: len(c.messages) >= 3)
            slow.reads.clear()
            await slow.done()
            await until(lambda: is_at_rest(app))
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    run(test())


def test_pings_while_there_is_nothing_to_say() -> None:
    """Fault (CASES B12): a proxy cuts a stream that is silent while the prompt is read."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, pace=Pace(ping_s=0.01))
        async with serving(app):
            gate.close()
            call = Call(app, CHAT, STREAM)
            await call.until(lambda c: c.body.count(b": ping\n\n") >= 3)
            assert [shape(event) for event in parse_events(call.body)] == ["role"]
            gate.open()
            await call.done()
            assert shape(call.events[-1]) == "done"

    run(test())


# -- what the log says ------------------------------------------------------------------------------------------------


def test_one_log_line_per_request_and_nothing_of_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a request leaves no line, or its words are in it."""

    async def test() -> None:
        app = fake_app(config=Config(api_key=(ApiKey.parse("sesame-open"),)))
        async with serving(app) as http:
            headers = {"authorization": "Bearer sesame-open", "x-request-id": "abc-1"}
            body = {**HELLO, "messages": [{"role": "user", "content": "platypus"}]}
            answer = await http.post(CHAT, json=body, headers=headers)
            assert answer.headers["x-request-id"] == "abc-1"
            assert answer.json()["id"].startswith("chatcmpl-abc-1-")
            assert answer.json()["choices"][0]["message"]["content"] not in caplog.text

    with caplog.at_level(logging.INFO, "chairlift"):
        run(test())
    (line,) = [record for record in caplog.records if record.message.startswith("request ")]
    fields: dict[str, Any] = line.fields  # type: ignore[attr-defined]
    assert fields["id"].startswith("chatcmpl-abc-1-")
    assert (fields["key"], fields["prompt_tokens"], fields["output_tokens"], fields["end"]) == (
        "key-1",
        25,
        8,
        "length",
    )
    assert 0 <= fields["queue_s"] <= fields["ttft_s"] <= fields["e2e_s"]
    assert "platypus" not in caplog.text
    assert "sesame" not in caplog.text
