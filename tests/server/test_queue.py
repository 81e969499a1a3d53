"""The queue as clients see it: refusals, /v1/queue, comments in streams; and several keys beside each other."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from chairlift.config import Config
from chairlift.engine.request import Request
from chairlift.keys import ApiKey
from chairlift.server.queue_status import QueueStatus
from chairlift.server.sse import Pace
from support.async_tests import run
from support.in_process_server import (
    CHAT,
    HELLO,
    TEXT,
    Call,
    Gate,
    assert_error,
    chat_text,
    fake_app,
    is_at_rest,
    metric,
    num_awaited,
    official_client,
    serving,
    shape,
    until,
)

STREAM = {**HELLO, "stream": True}
TEAM = Config(api_key=tuple(ApiKey.parse(f"{name}:{name}-secret") for name in ("alice", "bob")))
QUEUED = re.compile(rb"^: queued position=(\d+) expected_wait_s=(\d+)\n\n$")


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


def refused(app: Starlette, reason: str) -> float:
    return metric(app, f'requests_refused_total{{model_name="fake",reason="{reason}"}}')


def positions(call: Call) -> list[int]:
    """What a stream was told of its place, comment by comment."""
    found = [QUEUED.match(message.get("body", b"")) for message in call.messages]
    return [int(match[1]) for match in found if match]


def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes | None]]:
    """Every look that a stream takes at its place: its id, and what it is told."""
    looks: list[tuple[str, bytes | None]] = []
    comment = QueueStatus.comment

    def looked(status: QueueStatus, requests: Sequence[Request]) -> bytes | None:
        looks.append((requests[0].id, comment(status, requests)))
        return looks[-1][1]

    monkeypatch.setattr(QueueStatus, "comment", looked)
    return looks


def num_waiting(app: Starlette) -> int:
    return int(app.state.service.snapshot().num_waiting)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_queue_there_is_an_answer_at_once(stream: bool) -> None:
    """Fault (CASES A15): ten requests for two slots and four places; none is refused, or not within 50 ms."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=2, max_queue=4)
        async with serving(app) as http:
            gate.close()
            taken = []
            for i in range(6):
                taken.append(Call(app, CHAT, HELLO))
                if i == 0:
                    await gate.entered()
            await until(lambda: num_waiting(app) == 5)  # one of them is to have the free slot
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                answer = await http.post(CHAT, json={**HELLO, "stream": stream})
                seconds.append(time.perf_counter() - start)
                error = assert_error(answer, 503, "queue_full")
                assert (error["waiting"], error["running"]) == (4, 2)
                assert error["expected_wait_s"] >= 0
                assert answer.headers["retry-after"] == str(error["retry_after_s"])
                assert 1 <= error["retry_after_s"] <= 60
            assert sorted(seconds)[1] < 0.05, "one or two may be this machine's"
            assert refused(app, "queue_full") == 4
            assert num_waiting(app) == metric(app, 'num_requests_waiting{model_name="fake"}')
            gate.open()
            assert [(await call.done()).status for call in taken] == [200] * 6
            await until(lambda: is_at_rest(app))

    run(test())


def test_a_full_queue_is_said_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a client waits for the tokenizer, which is busy with others, to hear that there is no place."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=1, max_queue=0)
        async with serving(app) as http:
            gate.close()
            first = Call(app, CHAT, HELLO)
            await gate.entered()
            monkeypatch.setattr(app.state.service, "prepare", None)
            assert_error(await http.post(CHAT, json=HELLO), 503, "queue_full")
            gate.open()
            await first.done()

    run(test())


def test_who_has_waited_for_too_long_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a request waits for ever, a stream ends in silence, or a refusal is counted as a failure or twice."""

    async def test() -> None:
        monkeypatch.setattr("chairlift.server.service._WATCH_S", 0.01)
        gate = Gate()
        app = fake_app(gate, max_num_seqs=1, max_queue_wait_s=0.3)
        async with serving(app):
            gate.close()
            first = Call(app, CHAT, HELLO)
            await gate.entered()
            whole, stream = Call(app, CHAT, HELLO), Call(app, CHAT, STREAM)
            error = assert_error(await whole.done(), 503, "queue_wait")
            assert error["running"] == 1
            assert {"waiting", "expected_wait_s"} <= set(error)
            assert whole.headers["retry-after"] == str(error["retry_after_s"])
            await stream.done()
            assert stream.status == 200
            assert [shape(event) for event in stream.events] == ["role", "error", "done"]
            error = stream.events[1]["error"]
            assert (error["code"], error["type"], error["running"]) == ("queue_wait", "server_error", 1)
            assert refused(app, "queue_wait") == 2
            assert metric(app, 'requests_failed_total{model_name="fake"}') == 0
            gate.open()
            assert (await first.done()).status == 200
            await until(lambda: is_at_rest(app))

    run(test())


def test_draining_refusals_are_counted() -> None:
    """Fault: a restart that refuses many looks like a quiet hour."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            app.state.service.drain()
            assert_error(await http.post(CHAT, json=HELLO), 503, "draining")
            assert refused(app, "draining") == 1

    run(test())


# -- GET /v1/queue ----------------------------------------------------------------------------------------------------


def test_the_queue_can_be_looked_at() -> None:
    """Fault: nobody can tell a queue of three from one of thirty."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=1, max_queue=5)
        async with serving(app) as http:
            empty = (await http.get("/v1/queue")).json()
            assert (empty["num_waiting"], empty["num_running"], empty["expected_wait_s"]) == (0, 0, 0.0)
            assert (empty["waiting"], empty["max_queue"], empty["max_queue_wait_s"]) == ([], 5, None)
            gate.close()
            calls = [Call(app, CHAT, HELLO)]
            await gate.entered()
            for i in range(2):
                calls.append(Call(app, CHAT, HELLO, headers={"x-request-id": f"mine-{i}"}))
                await until(lambda i=i: num_waiting(app) == i + 1)  # type: ignore[misc]
            seen = (await http.get("/v1/queue")).json()
            assert (seen["num_waiting"], seen["num_running"], seen["num_preempted"]) == (2, 1, 0)
            assert [entry["position"] for entry in seen["waiting"]] == [1, 2]
            assert [entry["id"][:15] for entry in seen["waiting"]] == ["chatcmpl-mine-0", "chatcmpl-mine-1"]
            waits = [entry["expected_wait_s"] for entry in seen["waiting"]]
            assert waits == sorted(waits)
            assert seen["expected_wait_s"] >= waits[-1]
            assert all(entry["waited_s"] >= 0 for entry in seen["waiting"])
            gate.open()
            ids = [(await call.done()).json["id"] for call in calls]
            assert [entry["id"] for entry in seen["waiting"]] == ids[1:]

    run(test())


def test_ids_are_shown_to_their_own_key() -> None:
    """Fault: one key learns another's request ids, or does not find its own; or strangers see the queue."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, config=TEAM, max_num_seqs=1)
        async with serving(app) as http:
            assert_error(await http.get("/v1/queue"), 401, "invalid_api_key")
            gate.close()
            calls = [Call(app, CHAT, HELLO, headers=of("alice"))]
            await gate.entered()
            for number, name in enumerate(["alice", "alice", "bob"], start=1):
                calls.append(Call(app, CHAT, HELLO, headers=of(name)))
                await until(lambda number=number: num_waiting(app) == number)  # type: ignore[misc]
            seen = {
                name: (await http.get("/v1/queue", headers=of(name))).json()["waiting"] for name in ("alice", "bob")
            }
            assert [entry["id"] is not None for entry in seen["bob"]] == [False, True, False]
            assert [entry["id"] is not None for entry in seen["alice"]] == [True, False, True]
            gate.open()
            await asyncio.gather(*(call.done() for call in calls))

    run(test())


# -- comments ---------------------------------------------------------------------------------------------------------


def test_a_stream_that_waits_hears_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: silence in the queue, which clients and proxies take for a dead server; comments after the first step."""
    looks = told(monkeypatch)

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, pace=Pace(queue_s=0.02), max_num_seqs=1)
        async with serving(app):
            gate.close()
            first = Call(app, CHAT, STREAM)
            await gate.entered()
            second = Call(app, CHAT, STREAM)
            await until(lambda: num_waiting(app) == 1)
            third = Call(app, CHAT, STREAM, headers={"x-request-id": "third"})
            await third.until(lambda call: len(positions(call)) >= 3)
            assert (second.status, third.status) == (200, 200)
            assert (set(positions(second)), set(positions(third))) == ({1}, {2})
            second.disconnect()
            await until(lambda: num_awaited(app) == 2)
            gate.close_at = lambda step: len(step.tokens) > 1  # the prompt of the third
            gate.open()
            await until(lambda: gate.close_at is None)
            await until(lambda: any("third" in id and place is None for id, place in looks))
            num_told = len(positions(third))
            gate.open()
            await asyncio.gather(first.done(), third.done())
            assert positions(first) == []
            assert len(positions(third)) == num_told
            assert chat_text(third.events) == chat_text(first.events)
            assert shape(third.events[0]) == "role"

    run(test())


def test_comments_come_once_a_second() -> None:
    """Fault: a stream of comments that costs more than the answer."""

    async def test() -> None:
        assert Pace().queue_s == 1.0
        gate = Gate()
        app = fake_app(gate, pace=Pace(queue_s=60.0), max_num_seqs=1)
        async with serving(app):
            gate.close()
            first = Call(app, CHAT, STREAM)
            await gate.entered()
            second = Call(app, CHAT, STREAM)
            await second.until(lambda call: len(positions(call)) == 1)
            gate.open()
            await asyncio.gather(first.done(), second.done())
            assert positions(second) == [1]

    run(test())


def test_who_is_taken_at_once_hears_nothing() -> None:
    """Fault: every answer begins with a word about a queue that is empty."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=2)
        async with serving(app):
            gate.close()
            first = Call(app, CHAT, STREAM)
            await gate.entered()
            second = Call(app, CHAT, STREAM)
            await until(lambda: num_waiting(app) == 1)
            await second.until(lambda call: len(call.messages) == 2)
            gate.open()
            await asyncio.gather(first.done(), second.done())
            assert b"queued" not in first.body + second.body

    run(test())


def test_the_official_client_reads_past_the_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a comment that OpenAI's own package takes for an event."""
    looks = told(monkeypatch)

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, pace=Pace(queue_s=0.01), max_num_seqs=1, max_queue=1)
        async with serving(app) as http:
            client = official_client(http)
            alone = await client.chat.completions.create(model="fake", **HELLO)
            gate.close()
            first = Call(app, CHAT, HELLO)
            await gate.entered()

            async def read() -> str:
                stream = await client.chat.completions.create(model="fake", **STREAM)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            reading = asyncio.create_task(read())
            await until(lambda: num_waiting(app) == 1)
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="fake", **HELLO)
            assert caught.value.status_code == 503
            assert caught.value.body["code"] == "queue_full"  # type: ignore[index]
            await until(lambda: len(looks) > 3)
            gate.open()
            assert await reading == alone.choices[0].message.content
            await first.done()

    run(test())


# -- several keys -----------------------------------------------------------------------------------------------------


def test_keys_take_turns_and_limits_hold() -> None:
    """Fault: a colleague's batch of requests is served before one's single question; or takes every slot."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, config=TEAM, max_num_seqs=2, max_running_per_key=1)
        ended: list[str] = []

        async def ask(name: str, number: int) -> None:
            await Call(app, CHAT, {**HELLO, "max_tokens": 20}, headers=of(name)).done()
            ended.append(f"{name} {number}")

        async with serving(app), AsyncExitStack() as stack:
            stack.callback(gate.open)
            gate.close()
            tasks = [asyncio.create_task(ask("alice", 0))]
            await gate.entered()
            for number in range(1, 4):
                tasks.append(asyncio.create_task(ask("alice", number)))
                await until(lambda number=number: num_waiting(app) == number)  # type: ignore[misc]
            tasks.append(asyncio.create_task(ask("bob", 0)))
            await until(lambda: num_waiting(app) == 4)
            gate.open()
            await asyncio.gather(*tasks)
            assert ended.index("bob 0") <= 1
            assert [name for name in ended if name != "bob 0"] == [f"alice {i}" for i in range(4)]

    run(test())


@pytest.mark.parametrize("isolates", [False, True])
def test_what_one_key_has_asked_is_not_seen_by_another(isolates: bool) -> None:
    """Fault (CASES A30): a guess at another's prompt is confirmed by how soon it is answered."""

    async def test() -> None:
        app = fake_app(config=Config(api_key=TEAM.api_key, isolate_keys=isolates))
        prompt = {"prompt": "A secret of forty characters, or so it is.", "max_tokens": 1}

        async with serving(app) as http:

            async def cached(name: str, **more: Any) -> int:
                answer = await http.post(TEXT, json={**prompt, **more}, headers=of(name))
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert await cached("alice") == 0
            assert await cached("alice") == 32, "its own it may reuse"
            assert (await cached("bob") == 0) == isolates
            salt = app.state.service.serving.preparer._salt("alice", "")
            assert (salt == "") != isolates
            for guess in ("alice", salt or "none", f"{salt}:", "x"):
                assert await cached("bob", cache_salt=guess) == 0
            assert await cached("bob", cache_salt="x") == 32
            assert await cached("alice", cache_salt="x") == (0 if isolates else 32)

    run(test())


def test_names_are_in_the_log_and_secrets_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a key in the log, in an error or in /metrics; or nobody can see whose requests fill the queue."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, config=TEAM, max_num_seqs=1, max_queue=0)
        async with serving(app) as http:
            shown = []
            gate.close()
            first = Call(app, CHAT, HELLO, headers=of("alice"))
            await gate.entered()
            shown.append((await http.post(CHAT, json=HELLO, headers=of("bob"))).text)
            shown.append((await http.post(CHAT, json=HELLO, headers=of("carol"))).text)
            gate.open()
            await first.done()
            for path in ("/metrics", "/health", "/v1/queue", "/v1/models"):
                shown.append((await http.get(path, headers=of("alice"))).text)
            assert "-secret" not in "".join(shown) + repr(app.state.service.config)
            assert not re.search("alice|bob", "".join(shown))

    with caplog.at_level(logging.DEBUG, "chairlift"):
        run(test())
    assert "-secret" not in caplog.text
    assert re.search(r"request id=\S+ key=alice ", caplog.text)
    assert re.search(r"refused id=\S+ status=503 code=queue_full key=bob", caplog.text)
    assert re.search(r"refused id=\S+ status=401 code=invalid_api_key key=-", caplog.text)
