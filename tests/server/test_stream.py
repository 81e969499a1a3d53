"""Streams to the byte: order, headers, and that a stream says what the whole answer says."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.async_tests import run
from support.in_process_server import (
    CHAT,
    HELLO,
    TEXT,
    Call,
    chat_text,
    fake_app,
    fake_loaded,
    official_client,
    serving,
    shape,
)

STREAM = {**HELLO, "stream": True}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}


def test_chunk_order_of_a_chat() -> None:
    """Fault (CASES B1, B3, B4, B5): role repeated, reason on a content chunk, usage unasked or missing, no [DONE]."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            call = await Call(app, CHAT, WITH_USAGE).done()
            events = call.events
            kinds = [shape(event) for event in events]
            assert kinds == ["role", *["content"] * (len(kinds) - 4), "length", "usage", "done"]
            chunks = events[:-1]
            assert {(c["id"], c["created"], c["object"], c["model"]) for c in chunks} == {
                (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", "fake")
            }
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert all(c["choices"][0]["delta"]["content"] for c in chunks[1:-2])
            assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)

            whole = (await http.post(CHAT, json=HELLO)).json()
            assert chat_text(events) == whole["choices"][0]["message"]["content"]
            usage = chunks[-1]["usage"]
            assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
            assert usage["total_tokens"] == whole["usage"]["total_tokens"] == 22 + 8

            plain = (await Call(app, CHAT, STREAM).done()).events
            assert all("usage" not in event for event in plain[:-1])
            assert [shape(event) for event in plain][-2:] == ["length", "done"]

    run(test())


def test_chunk_order_of_a_text() -> None:
    """Fault: as above, on the other endpoint."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
            events = (await Call(app, TEXT, {**body, "stream": True}).done()).events
            kinds = [shape(event) for event in events]
            assert kinds == ["content"] * (len(kinds) - 2) + ["length", "done"]
            whole = (await http.post(TEXT, json=body)).json()
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == whole["choices"][0]["text"]

    run(test())


def test_headers_and_bytes_of_a_stream() -> None:
    """Fault (CASES B13): a proxy gathers or caches events, or guesses their encoding."""

    async def test() -> None:
        app = fake_app()
        async with serving(app):
            call = await Call(app, CHAT, {**STREAM, "messages": [{"role": "user", "content": "grüße"}]}).done()
            assert call.status == 200
            assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert call.headers["cache-control"] == "no-cache"
            assert call.headers["x-accel-buffering"] == "no"
            assert "content-length" not in call.headers
            assert call.body.isascii()
            assert [m["type"] for m in call.messages] == ["http.response.start"] + ["http.response.body"] * (
                len(call.messages) - 1
            )
            assert [m.get("more_body") for m in call.messages[1:]] == [True] * (len(call.messages) - 2) + [False]

    run(test())


def test_a_stop_string_ends_both_ways_alike() -> None:
    """Fault (CASES B8): text of the stop, or after it, is sent."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            text = (await http.post(CHAT, json=HELLO)).json()["choices"][0]["message"]["content"]
            body = {**HELLO, "stop": [text[3:5], "never"]}
            whole = (await http.post(CHAT, json=body)).json()["choices"][0]
            assert (whole["message"]["content"], whole["finish_reason"]) == (text[:3], "stop")
            events = (await Call(app, CHAT, {**body, "stream": True}).done()).events
            assert chat_text(events) == text[:3]
            assert shape(events[-2]) == "stop"

    run(test())


def test_several_choices_each_have_their_own_chunks() -> None:
    """Fault (CASES D7): choices are mixed up, or the prompt is counted for each."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            body = {**WITH_USAGE, "n": 3, "temperature": 1, "seed": 5}
            events = (await Call(app, CHAT, body).done()).events
            whole = (await http.post(CHAT, json={**body, "stream": False, "stream_options": None})).json()
            texts = [choice["message"]["content"] for choice in whole["choices"]]
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
            assert [chat_text(events, i) for i in range(3)] == texts
            assert len(set(texts)) == 3
            assert [shape(e) for e in events[:3]] == ["role"] * 3
            for index in range(3):
                own = [e for e in events[:-2] if e["choices"][0]["index"] == index]
                assert [shape(e) for e in own] == ["role", *["content"] * (len(own) - 2), "length"]
            assert events[-2]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == 22
            assert events[-2]["usage"]["completion_tokens"] == 24

    run(test())


def test_chat_logprobs_are_equal_both_ways() -> None:
    """Fault (CASES B18): log-probabilities are lost or different in a stream."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            body = {**HELLO, "logprobs": True, "top_logprobs": 3}
            whole = (await http.post(CHAT, json=body)).json()["choices"][0]
            entries = whole["logprobs"]["content"]
            assert len(entries) == 8
            assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
            assert bytes(b for e in entries for b in e["bytes"]).decode() == whole["message"]["content"]
            events = (await Call(app, CHAT, {**body, "stream": True}).done()).events
            chunks = [e["choices"][0]["logprobs"] for e in events[1:-2]]
            assert [entry for chunk in chunks for entry in chunk["content"]] == entries

    run(test())


def test_echo_and_its_logprobs_are_equal_both_ways() -> None:
    """Fault (CASES D22): echoed log-probabilities are shifted, stale from the cache, or differ in a stream."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            body = {"prompt": "a" * 40, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2, "n": 2}
            first, second = [(await http.post(TEXT, json=body)).json()["choices"] for _ in range(2)]
            assert first == second
            for choice in first:
                logprobs, text = choice["logprobs"], choice["text"]
                assert text.startswith("a" * 40)
                assert len(text) == 44
                assert logprobs["token_logprobs"][0] is None
                assert logprobs["top_logprobs"][0] is None
                assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
                assert [len(logprobs[name]) for name in ("tokens", "top_logprobs", "text_offset")] == [44] * 3
                assert [text[at] for at in logprobs["text_offset"]] == logprobs["tokens"]
            events = (await Call(app, TEXT, {**body, "stream": True}).done()).events[:-1]
            for index, choice in enumerate(first):
                own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
                assert "".join(c["text"] for c in own) == choice["text"]
                pieces = [c["logprobs"] for c in own if c["logprobs"] is not None]
                for name, values in choice["logprobs"].items():
                    assert [value for piece in pieces for value in piece[name]] == values

    run(test())


def test_prompt_only() -> None:
    """Fault (CASES D5): max_tokens 0 makes tokens; a one-token prompt has no first entry."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            for prompt in ("a", "abc"):
                body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
                answer = (await http.post(TEXT, json=body)).json()
                (choice,) = answer["choices"]
                assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
                assert choice["logprobs"]["tokens"] == list(prompt)
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert answer["usage"]["completion_tokens"] == 0
                events = (await Call(app, TEXT, {**body, "stream": True}).done()).events
                assert [shape(e) for e in events] == ["content", "length", "done"]
                assert events[0]["choices"][0]["logprobs"] == choice["logprobs"]

    run(test())


def test_prompt_logprobs() -> None:
    """Fault: vLLM's extension is accepted and left out."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            text = (await http.post(TEXT, json={"prompt": "abc", "prompt_logprobs": 2})).json()["choices"][0]
            assert text["prompt_logprobs"][0] is None
            assert [len(entry) in (2, 3) for entry in text["prompt_logprobs"][1:]] == [True, True]
            assert text["prompt_logprobs"][2][str(ord("c"))]["decoded_token"] == "c"

    run(test())


def test_prompt_logprobs_of_a_chat() -> None:
    """Fault: as above, for chats, whose answer carries them at its top."""

    async def test() -> None:
        app = fake_app(loaded=fake_loaded(template="{{ messages[0].content }}"))
        async with serving(app) as http:
            body = {**HELLO, "messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 0}
            entries = (await http.post(CHAT, json=body)).json()["prompt_logprobs"]
            assert [entry and list(entry) for entry in entries] == [None, [str(ord("b"))], [str(ord("c"))]]

    run(test())


def test_warnings_come_once_and_first() -> None:
    """Fault (CASES D24): a stream leaves out what the whole response says."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            odd = {"num_ctx": 1}
            assert "num_ctx" in (await http.post(CHAT, json={**HELLO, **odd})).json()["warnings"][0]
            for path, body in ((CHAT, STREAM), (TEXT, {"prompt": "a", "stream": True})):
                events = (await Call(app, path, {**body, **odd}).done()).events
                assert "num_ctx" in events[0]["warnings"][0]
                assert events[0]["choices"]
                assert all("warnings" not in event for event in events[1:-1])

    run(test())


def test_cached_tokens_are_reported() -> None:
    """Fault: usage hides what the prefix cache saved."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            for expected in (0, 48):
                usage = (await http.post(TEXT, json={"prompt": "q" * 50})).json()["usage"]
                assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
                assert usage["prompt_tokens"] == 50

    run(test())


def test_the_official_client_reads_everything() -> None:
    """Fault: a shape that only our own tests accept."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            client = official_client(http)
            messages: Any = HELLO["messages"]
            whole = await client.chat.completions.create(
                model="fake", messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=1
            )
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            text = ""
            stream = await client.chat.completions.create(
                model="fake", messages=messages, max_tokens=8, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            async with client.chat.completions.stream(
                model="fake", messages=messages, max_tokens=8, temperature=0, stop=text[4]
            ) as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == text[:4]
            assert final.choices[0].finish_reason == "stop"
            completion = await client.completions.create(model="fake", prompt=[1, 2, 3], logprobs=1, echo=True)
            assert completion.choices[0].logprobs is not None
            assert [model.id async for model in client.models.list()] == ["fake", "alias"]
            with pytest.raises(openai.NotFoundError, match="fake, alias"):
                await client.chat.completions.create(model="gpt-4", messages=messages)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="fake", prompt="a" * 600)
            assert caught.value.code == "context_length_exceeded"

    run(test())
