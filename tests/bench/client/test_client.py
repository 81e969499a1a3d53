"""The measuring client against servers whose every time is known, in a time that jumps: all figures are exact."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import aiohttp
import pytest

from chairlift.bench.client.client import Client
from chairlift.bench.client.sample import EventKind, Failure, Sample
from chairlift.bench.client.target import Api, GenerationRequest, ServerKind, Target
from support.async_tests import run
from support.scripted_server import (
    DONE,
    PING,
    ROLE,
    WALL_START_S,
    MockLLM,
    Reply,
    Script,
    delta,
    ending,
    paced,
    refusal,
    run_virtual,
    sse,
    tcp,
    usage,
    virtual_clock,
    whole,
)


def ask(reply: Reply | Script, target: Target | None = None, **options: Any) -> Sample:
    """What the client makes of one reply."""

    async def test() -> Sample:
        async with MockLLM(lambda *_: reply).client(target, timeout_s=60) as client:
            return await client.ask(GenerationRequest("Hello", 4, **options))

    return run_virtual(test())


def kinds(sample: Sample) -> list[EventKind]:
    return [event.kind for event in sample.events]


# -- what is a token --------------------------------------------------------------------------------------------------


def test_a_role_at_once_and_text_after_two_seconds_is_two_seconds() -> None:
    """vllm#3768: the chunk that names the speaker counted as the first token."""
    seen = ask([(0.0, ROLE), (2.0, delta(content="Hi")), (0.5, ending(1))])
    assert (seen.first_token_s, seen.first_visible_s, seen.e2e_s) == (2.0, 2.0, 2.5)
    assert kinds(seen) == [EventKind.ROLE, EventKind.TEXT, EventKind.FINISH, EventKind.USAGE, EventKind.DONE]
    assert (seen.finish_reason, seen.num_prompt_tokens, seen.num_output_tokens) == ("length", 7, 1)


def test_empty_texts_are_no_tokens() -> None:
    """api7/aisix#869: `content: ""` counted, a TTFT of 1 ms."""
    empty: list[dict[str, Any]] = [{"content": ""}, {"content": None, "reasoning_content": ""}, {"tool_calls": []}]
    seen = ask([*((0.1, delta(**said)) for said in empty), (1.0, delta(content=" ")), (0.0, ending(1))])
    assert seen.first_token_s == 1.3


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_counts_as_tokens_and_not_as_visible(name: str) -> None:
    """guidellm#737: a model that thinks first, measured from its first visible word alone, or not at all."""
    thought = [(1.0, delta(**{name: "hm"})), (1.0, delta(**{name: " so"}))]
    seen = ask([*thought, (1.0, delta(content="42")), (0.0, ending(3))])
    assert (seen.first_token_s, seen.first_visible_s) == (1.0, 3.0)
    assert seen.itl_s == (1.0, 1.0)


def test_a_tool_call_is_visible() -> None:
    """A stream of tool calls only, measured as one without output."""
    call = {"index": 0, "function": {"name": "look", "arguments": ""}}
    seen = ask([(1.0, delta(tool_calls=[call])), (0.0, delta("tool_calls") + DONE)])
    assert (seen.first_visible_s, seen.finish_reason) == (1.0, "tool_calls")


def test_four_tokens_a_chunk_are_counted_by_usage() -> None:
    """vllm#42661: chunks counted as tokens; a server that sends four at a time looks four times slower."""
    seen = ask([*((0.4, delta(content=" a b c d")) for _ in range(5)), (0.0, ending(20))])
    assert (seen.num_output_tokens, len(seen.token_times), seen.tokens_per_event) == (20, 5, 4.0)
    assert seen.tpot_s == pytest.approx(1.6 / 19, abs=1e-12)


def test_without_usage_nothing_is_estimated() -> None:
    """A hundred spaces that become seven tokens under somebody else's tokenizer."""
    seen = ask([(1.0, delta(content=" " * 100)), (0.0, delta("stop") + DONE)])
    assert (seen.num_output_tokens, seen.tpot_s, seen.failure) == (None, None, None)


def test_tokens_of_a_chunk_where_the_server_says_so() -> None:
    """Chunks of several tokens that could have been told apart."""
    listed = {"choices": [{"index": 0, "delta": {"content": "ab"}, "logprobs": {"content": [{}, {}]}}]}
    running = {"choices": [{"index": 0, "delta": {"content": "c"}}], "usage": {"completion_tokens": 3}}
    more = {"choices": [{"index": 0, "delta": {"content": "defg"}}], "usage": {"completion_tokens": 7}}
    seen = ask([(0.1, sse(listed)), (0.1, sse(running)), (0.1, sse(more)), (0.0, ending(7))])
    assert [event.num_tokens for event in seen.events[:3]] == [2, 3, 4]


def test_pings_are_no_tokens() -> None:
    """Comments that keep a connection open, counted as output."""
    queued = b": queued position=3 expected_wait_s=12\n\n"
    seen = ask([(0.0, queued), (1.0, PING), (1.0, delta(content="Hi")), (0.0, ending(1))])
    assert seen.first_token_s == 2.0
    assert kinds(seen)[:3] == [EventKind.PING, EventKind.PING, EventKind.TEXT]
    assert seen.events[0].num_bytes == len(queued) - 1  # the empty line belongs to what follows


def test_bytes_are_counted() -> None:
    """A buffer whose size cannot be told from what came through it."""
    pieces = [ROLE, delta(content="Hi"), ending(1)]
    seen = ask([(0.1, piece) for piece in pieces])
    assert sum(event.num_bytes for event in seen.events) == sum(map(len, pieces))


# -- what is a failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (refusal(503, "full"), Failure.HTTP_503),
        (refusal(429), Failure.HTTP_429),
        (refusal(418), Failure.HTTP_4XX),
        (refusal(502), Failure.HTTP_5XX),
        (refusal(307, location="http://elsewhere"), Failure.HTTP_3XX),
        (
            [(0.0, ROLE), (1.0, delta(content="Hi")), (0.5, sse({"error": {"message": "no"}}) + DONE)],
            Failure.ERROR_EVENT,
        ),
        ([(1.0, b'event: error\ndata: {"message": "no"}\n\n'), (0.0, DONE)], Failure.ERROR_EVENT),
        ([(1.0, b'error: {"message": "no"}\n\n')], Failure.ERROR_EVENT),
        ([(1.0, delta("abort", content="Hi")), (0.0, DONE)], Failure.ERROR_EVENT),
        ([(0.0, ROLE), (1.0, delta(content="Hi"))], Failure.CLOSED_EARLY),
        (Reply([(1.0, delta(content="Hi"))], is_cut=True), Failure.CLOSED_EARLY),
        (Reply([(1.0, delta("stop", content="Hi"))], is_cut=True), Failure.CLOSED_EARLY),
        ([(1.0, b"data: {oops\n\n")], Failure.BAD_STREAM),
        ([(1.0, b"data: [1]\n\n")], Failure.BAD_STREAM),
        ([(1.0, sse({"choices": [3]}))], Failure.BAD_STREAM),
        (Reply(whole(3, 1.0), content_type="application/json"), Failure.BAD_STREAM),
        ([(61.0, ROLE)], Failure.TIMEOUT),
    ],
)
def test_failures_have_their_cause(reply: Reply | Script, failure: Failure) -> None:
    """vllm#57519: an answer that broke off counted as a fast one."""
    assert ask(reply).failure is failure


def test_what_a_failure_said_is_kept() -> None:
    """ "503" where the server had said when to come back and why."""
    seen = ask(refusal(503, "the queue\nis full", **{"retry-after": "7"}))
    assert (seen.failure_detail, seen.retry_after_s, seen.num_output_tokens) == ("the queue is full", 7.0, None)
    broken = ask([(1.0, delta(content="Hi")), (0.5, sse({"error": {"message": "step failed"}}) + DONE)])
    assert (broken.failure_detail, broken.e2e_s) == ("step failed", 1.5)


def test_bodies_that_come_in_pieces_are_read_whole() -> None:
    """The first packet taken for all of it: over a network counters are lacking, or cut in a number."""
    body = json.dumps({"error": {"message": "full", "retry_after_s": 9}}).encode()
    seen = ask(Reply([(0.0, body[:20]), (0.1, body[20:])], 503, "application/json"))
    assert (seen.failure_detail, seen.retry_after_s) == ("full", 9.0)

    async def test() -> bytes:
        mock = MockLLM(lambda *_: refusal(500), {"/metrics": "vllm:prompt_tokens_total 1234"})
        mock.page_pause_s = 0.1
        async with mock.client() as client:
            return (await client.get("/metrics"))[1]

    assert run_virtual(test()) == b"vllm:prompt_tokens_total 1234"


def test_nothing_is_tried_again() -> None:
    """gpustack#1677: 503s that the client hid by asking again."""

    async def test() -> None:
        mock = MockLLM(lambda *_: refusal(503))
        async with mock.client() as client:
            await client.ask(GenerationRequest("Hello", 4))
        assert len(mock.requests) == 1

    run_virtual(test())


def test_each_request_has_a_connection_of_its_own() -> None:
    """Every second request lost to llama-server, which closes after a stream without having said so."""

    async def test() -> int:
        mock = MockLLM(lambda *_: paced(1, 0.0, 0.0))
        async with tcp(mock) as url, Client(Target(url, "m")) as client:
            for _ in range(3):
                assert (await client.ask(GenerationRequest("Hello", 1))).failure is None
        return mock.num_connections

    assert run(test()) == 3


def test_a_server_that_is_not_there() -> None:
    """A refused connection that ends the whole run."""

    async def test() -> Sample:
        connector = aiohttp.UnixConnector("/nonexistent/socket")
        async with Client(Target("http://mock", "m"), clock=virtual_clock(), connector=connector) as client:
            return await client.ask(GenerationRequest("Hello", 4))

    assert run_virtual(test()).failure is Failure.CONNECT


@pytest.mark.parametrize("end", [delta("stop"), DONE])
def test_either_end_is_one(end: bytes) -> None:
    """Servers that send no [DONE], or no reason, called broken."""
    assert ask([(1.0, delta(content="Hi")), (0.0, end)]).failure is None


def test_what_follows_the_end_is_not_counted() -> None:
    """A connection that stays open after [DONE] counted as work."""
    seen = ask([(1.0, delta("stop", content="Hi") + DONE), (5.0, delta(content="?"))])
    assert (seen.e2e_s, len(seen.token_events)) == (1.0, 1)


# -- how it is asked --------------------------------------------------------------------------------------------------


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    """E2E reported as TTFT for requests that were not streamed."""
    seen = ask(Reply(whole(3, 2.0), content_type="application/json"), is_streamed=False)
    assert (seen.first_token_s, seen.first_visible_s, seen.events) == (None, None, ())
    assert (seen.e2e_s, seen.num_output_tokens, seen.finish_reason) == (2.0, 3, "length")


@pytest.mark.parametrize("body", [b"[]", b"{", b"{}", b'{"choices": [{"message": {"content": "Hi"}}]}'])
def test_a_body_that_is_no_answer_is_a_failure(body: bytes) -> None:
    """A proxy's page with status 200 counted as a fast answer."""
    seen = ask(Reply([(1.0, body)], content_type="application/json"), is_streamed=False)
    assert seen.failure is Failure.BAD_ANSWER


def test_lateness_of_the_client_is_its_own_line() -> None:
    """vllm#54101: a client that is busy hides the time that its requests waited in it."""

    async def test() -> Sample:
        async with MockLLM(lambda *_: paced(2, 1.0, 0.5)).client() as client:
            await asyncio.sleep(3.0)
            return await client.ask(GenerationRequest("Hello", 2), scheduled_s=1.0)

    seen = run_virtual(test())
    assert (seen.dispatch_delay_s, seen.first_token_s, seen.e2e_s) == (2.0, 3.0, 3.5)


def test_requests_run_side_by_side() -> None:
    """A connection pool with a limit: a queue in the client that looks like one in the server."""

    async def test() -> list[Sample]:
        async with MockLLM(lambda *_: paced(1, 1.0, 0.0)).client() as client:
            return list(await asyncio.gather(*(client.ask(GenerationRequest("Hello", 1), index=i) for i in range(150))))

    assert {sample.e2e_s for sample in run_virtual(test())} == {1.0}


@pytest.mark.parametrize("kind", list(ServerKind))
def test_each_server_is_asked_for_an_exact_length_in_its_words(kind: ServerKind) -> None:
    """A field that one server needs and another refuses."""
    body = GenerationRequest("Hello", 9).body(Target("", "m", kind=kind))
    assert body["max_tokens"] == 9
    assert ("ignore_eos" in body) == (kind not in (ServerKind.OLLAMA, ServerKind.OTHER))
    assert body.get("min_tokens") == (9 if kind in (ServerKind.CHAIRLIFT, ServerKind.VLLM) else None)
    assert "ignore_eos" not in GenerationRequest("Hello", 9, is_exact=False).body(Target("", "m", kind=kind))


def test_the_three_apis() -> None:
    """Messages sent as a text, or a text as messages."""
    text = GenerationRequest("Hello", 9)
    assert text.body(Target("", "m"))["messages"] == [{"role": "user", "content": "Hello"}]
    completion = text.body(Target("", "m", Api.COMPLETIONS))
    assert (completion["prompt"], "messages" in completion) == ("Hello", False)
    ollama = text.body(Target("", "m", Api.OLLAMA))
    assert ollama["options"] == {"num_predict": 9, "temperature": 0}
    assert ("stream_options" in ollama, "max_tokens" in ollama) == (False, False)


def test_stamps_are_read_onto_the_clock_of_the_run() -> None:
    """Send times of another machine's clock beside times of this run's."""
    stamped = sse({"choices": [{"delta": {"content": "Hi"}}], "timestamps": {"sent_s": WALL_START_S + 1.5}})
    target = Target("http://mock", "m", kind=ServerKind.CHAIRLIFT)
    seen = ask([(2.0, stamped), (0.0, ending(1))], target, has_stamps=True)
    assert (seen.events[0].sent_at_s, seen.events[0].at_s) == (1.5, 2.0)
    assert GenerationRequest("", 1, has_stamps=True).body(target)["stream_options"]["include_timestamps"] is True
    assert "include_timestamps" not in GenerationRequest("", 1, has_stamps=True).body(Target(""))["stream_options"]


def test_nothing_is_compressed_unless_asked() -> None:
    """A proxy that compresses for us alone, or that does not although it does for everybody else."""

    async def test(**options: Any) -> str:
        mock = MockLLM(lambda *_: paced(1, 0.0, 0.0))
        async with mock.client(**options) as client:
            await client.ask(GenerationRequest("Hello", 1))
        return mock.headers[0]["accept-encoding"]

    assert run_virtual(test()) == "identity"
    assert run_virtual(test(accepts_gzip=True)) == "gzip, deflate"


def test_the_key_is_sent() -> None:
    """A server with keys that cannot be measured."""

    async def test() -> None:
        mock = MockLLM(lambda *_: paced(1, 0.0, 0.0))
        async with mock.client(Target("http://mock/v1/", "m", api_key="k")) as client:
            await client.ask(GenerationRequest("Hello", 1))
        assert mock.headers[0]["authorization"] == "Bearer k"
        assert mock.paths == ["/v1/chat/completions"]

    run_virtual(test())


# -- other servers ----------------------------------------------------------------------------------------------------


def line(**value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def test_ollamas_own_api() -> None:
    """A line of JSON each, counts in the last, and the time at which each was made."""
    made = "2023-11-14T22:13:21.250000000Z"  # WALL_START_S + 1.25
    script = [
        (1.0, line(created_at=made, message={"content": "", "thinking": "hm"}, done=False)),
        (0.5, line(created_at=made, message={"content": "Hi"}, done=False)),
        (0.5, line(message={"content": ""}, done=True, done_reason="stop", prompt_eval_count=11, eval_count=5)),
    ]
    seen = ask(Reply(script, content_type="application/x-ndjson"), Target("http://mock", "m", Api.OLLAMA))
    assert (seen.first_token_s, seen.first_visible_s, seen.e2e_s) == (1.0, 1.5, 2.0)
    assert (seen.num_prompt_tokens, seen.num_output_tokens, seen.finish_reason) == (11, 5, "stop")
    assert seen.events[0].sent_at_s == 1.25
    assert ask(Reply([(0.0, line(error="no"))]), Target("http://mock", "m", Api.OLLAMA)).failure is Failure.ERROR_EVENT


def test_ollama_in_one_piece() -> None:
    """An answer that has its counts beside its message."""
    body = line(message={"content": "Hi"}, done=True, done_reason="length", prompt_eval_count=11, eval_count=5)
    target = Target("http://mock", "m", Api.OLLAMA)
    seen = ask(Reply([(2.0, body)], content_type="application/json"), target, is_streamed=False)
    assert (seen.e2e_s, seen.num_output_tokens, seen.finish_reason) == (2.0, 5, "length")


def test_llama_server_counts_cached_tokens_beside_its_usage() -> None:
    """A warm cache that goes unflagged, since usage is silent about it."""
    counts = {"prompt_tokens": 90, "completion_tokens": 1}
    last = sse({"choices": [], "usage": counts, "timings": {"cache_n": 80, "prompt_n": 10, "predicted_n": 1}})
    seen = ask([(1.0, delta("stop", content="Hi")), (0.0, last + DONE)])
    assert (seen.num_prompt_tokens, seen.num_cached_tokens, seen.num_output_tokens) == (90, 80, 1)


@pytest.mark.parametrize("said", ["5", 5.5, -1, None, [5]])
def test_counts_that_are_none_are_unknown(said: Any) -> None:
    """A word where a number should be, that ends the run an hour later in somebody's arithmetic."""
    seen = ask([(1.0, delta("stop", content="Hi")), (0.0, usage(said) + DONE)])
    assert (seen.num_output_tokens, seen.failure) == (None, None)


def test_llama_servers_timings() -> None:
    """A server that counts in `timings`: prompt tokens without those of the cache."""
    last = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
        "timings": {"cache_n": 30, "prompt_n": 12, "predicted_n": 1, "predicted_ms": 3.0},
    }
    seen = ask([(1.0, delta(content="Hi")), (0.0, sse(last) + DONE)])
    assert (seen.num_prompt_tokens, seen.num_cached_tokens, seen.num_output_tokens) == (42, 30, 1)


def test_vllms_shape() -> None:
    """Text and its reason in one chunk, and usage with what was cached."""
    seen = ask([(0.0, ROLE), (1.0, delta("length", content="Hi")), (0.0, usage(1, 40, 32) + DONE)])
    assert kinds(seen)[1:3] == [EventKind.TEXT, EventKind.FINISH]
    assert (seen.num_cached_tokens, seen.first_token_s, seen.failure) == (32, 1.0, None)
    assert sum(event.num_bytes for event in seen.events[1:3]) == len(delta("length", content="Hi"))


def test_text_completions() -> None:
    """Text at another place than a chat has it."""
    chunk = sse({"choices": [{"index": 0, "text": "Hi", "finish_reason": None}]})
    seen = ask([(1.0, chunk), (0.0, ending(1))], Target("http://mock", "m", Api.COMPLETIONS))
    assert seen.first_token_s == 1.0


def test_who_leaves_takes_the_connection_along() -> None:
    """Streams that run on in the server after Ctrl-C."""

    async def test() -> None:
        mock = MockLLM(lambda *_: paced(100, 1.0, 1.0))
        async with mock.client() as client:
            asking = asyncio.create_task(client.ask(GenerationRequest("Hello", 4)))
            await asyncio.sleep(5.5)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.sleep(5)
            assert mock.num_left == 1

    run_virtual(test())


def test_serving_does_not_load_the_bench() -> None:
    """A server that carries its measuring tool in memory. Its modules cannot (test_structure); its command could."""
    code = "import sys, chairlift.cli; sys.exit('chairlift.bench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
