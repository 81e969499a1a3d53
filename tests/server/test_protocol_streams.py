"""Streams to the byte, and that they say what the answer in one piece says, whatever the model does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.sse import Pace
from support.async_tests import run
from support.in_process_server import CHAT, TEXT, Call, Gate, fake_app, serving, shape, until
from support.scripted_model import EOS, Scripted, logprob_of
from support.stream_cases import CASES, NAMES, path_of, recorded

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted() as running:
        yield running


# -- every way a stream can end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_streams_are_as_recorded(name: str) -> None:
    """Fault: any change of what clients read, wanted or not (see stream_cases.py)."""
    assert recorded(name) == path_of(name).read_bytes()


ENDS = {
    "stop": "stop", "length": "length", "no-text": "stop", "stop-string": "stop", "half-a-stop-string": "stop",
    "half-a-character": "stop", "usage": "stop", "warnings": "stop", "two-choices": "stop", "logprobs": "stop",
    "timestamps": "stop", "error-first": "error", "error-later": "error", "error-in-one-choice": "error",
    "drained": "error", "ended-by-server": "error",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_chunks(name: str) -> None:
    """Fault (CASES B1 to B5, B11): roles repeated, text in the last chunk, usage unasked, an end missing or doubled."""
    kind, _, case = name.partition("-")
    events = [json.loads(line[6:]) for line in path_of(name).read_text().split("\n\n")[:-2]]
    for index in range(CASES[case].body.get("n", 1)):
        own = [e for e in events if "error" in e or not e["choices"] or e["choices"][0]["index"] == index]
        kinds = [shape(event) for event in own]
        roles = ["role"] if kind == "chat" else []
        usage = ["usage"] if "stream_options" in CASES[case].body and ENDS[case] != "error" else []
        ends = [ENDS[case], *usage]
        if case == "error-in-one-choice" and index == 0:
            ends = [k for k in kinds if k in ("stop", "error")]
        assert kinds == [*roles, *["content"] * (len(kinds) - len(roles) - len(ends)), *ends]
    for event in events[:-1]:
        if usage := event.get("usage"):
            raise AssertionError(usage)
    assert set(ENDS) == set(CASES)
    assert len({(e["id"], e["created"], e["model"]) for e in events if "error" not in e}) <= 1


def test_pings_do_not_come_before_their_time() -> None:
    """Fault: the first ping is due at once, since nothing was sent since the epoch."""

    async def test() -> None:
        gate, looks = Gate(), 0
        app = fake_app(gate, pace=Pace(queue_s=0.001, ping_s=1000))
        async with serving(app):
            status = app.state.service.serving.queue_status
            comment = status.comment

            def counted(requests: Any) -> bytes | None:
                nonlocal looks
                said: bytes | None = comment(requests)
                looks += said is None
                return said

            status.comment = counted
            gate.close()
            call = Call(app, TEXT, {"prompt": "a", "stream": True})
            await gate.entered()
            await until(lambda: looks > 0)
            for _ in range(10):
                await asyncio.sleep(0)
            gate.open()
            await call.done()
            assert b"ping" not in call.body

    run(test())


# -- in pieces and in one piece ---------------------------------------------------------------------------------------


def full_decode(vocab: list[bytes], tokens: list[int]) -> str:
    return b"".join(vocab[t] for t in tokens).decode("utf-8", errors="replace")


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the stop that is complete first, the longest of several; and whether there was one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


PIECES = [
    b"", b" ", b" the", b"the", b"a", b"ab", b"b", b"\n", "é".encode(), "🌍".encode(), "你".encode(), b"\xf0\x9f",
    b"\xe4", b"\xbd\xa0", b"\x8c\x8d", b"\xff", b"\xc3", b"\xa9", b"\x00", b'"', b"\\", b"data: x\n\n",
    "\u2028".encode(),
]  # fmt: skip
scripts = st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=12), min_size=1, max_size=3)
stop_lists = st.lists(
    st.sampled_from(["ab", "b", "aab", " the", "é", "\ufffd", "a\n", "🌍", "\n\n"]), max_size=3, unique=True
)


@settings(max_examples=150, deadline=None)
@given(scripts=scripts, stops=stop_lists, is_chat=st.booleans(), max_tokens=st.integers(1, 14), top=st.integers(0, 2))
def test_streamed_is_unstreamed_is_the_full_decode(
    server: Scripted, scripts: list[list[int]], stops: list[str], is_chat: bool, max_tokens: int, top: int
) -> None:
    """Fault (CASES B6 to B8, B18): text lost, doubled or changed by how it was cut; logprobs or usage that differ."""
    vocab = list(server.loaded.tokenizer.vocab_bytes)
    vocab[: len(PIECES)] = PIECES
    server.loaded.tokenizer.vocab_bytes = tuple(vocab)
    server.say(*([*script, EOS] for script in scripts))
    body: dict[str, Any] = {"n": len(scripts), "stop": stops, "max_tokens": max_tokens}
    body |= {**HI, "logprobs": True, "top_logprobs": top} if is_chat else {"prompt": [97, 98], "logprobs": top}
    path = CHAT if is_chat else TEXT
    whole = server.whole(path, body)
    events = server.stream(path, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        index = choice["index"]
        own = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
        text = choice["message"]["content"] if is_chat else choice["text"]
        tokens = [*scripts[index], EOS][:max_tokens]
        silent = [token for token in tokens if token != EOS]
        assert (text, choice["finish_reason"]) == expected_end(full_decode(vocab, silent), stops, EOS in tokens)
        assert "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert joined(c["logprobs"] for c in own) == choice["logprobs"] | ({"refusal": None} if is_chat else {})
        check_logprobs(choice["logprobs"], tokens, vocab)
    usage, streamed = whole["usage"], events[-1]["usage"]
    cached = [u.pop("prompt_tokens_details")["cached_tokens"] for u in (usage, streamed)]
    assert usage == streamed
    assert cached[1] <= usage["prompt_tokens"]


def expected_end(text: str, stops: list[str], has_end: bool) -> tuple[str, str]:
    text, is_stopped = cut(text, stops)
    return text, "stop" if is_stopped or has_end else "length"


def joined(pieces: Any) -> dict[str, Any]:
    """Log-probabilities of all chunks, field by field."""
    whole: dict[str, Any] = {}
    for piece in pieces:
        for name, values in (piece or {}).items():
            whole[name] = None if values is None else [*whole.get(name, []), *values]
    return whole


def check_logprobs(logprobs: dict[str, Any], tokens: list[int], vocab: list[bytes]) -> None:
    """That they are of the model's own tokens in order, as natural logs, with raw bytes."""
    if "content" in logprobs:
        entries = logprobs["content"]
        said = tokens[: len(entries)]
        assert [bytes(entry["bytes"]) for entry in entries] == [vocab[token] for token in said]
        assert [entry["logprob"] for entry in entries] == [logprob_of(token) for token in said]
    else:
        assert logprobs["token_logprobs"] == [logprob_of(t) for t in tokens[: len(logprobs["tokens"])]]


@pytest.mark.parametrize("stop", [None, "never"])
def test_nothing_is_held_back_without_need(stop: str | None) -> None:
    """Fault (CASES B8): a stop string, or a character in two tokens, delays text that it has no part in."""
    with Scripted(lockstep=True) as server:
        server.say([*"a nebé".encode(), EOS])
        events = server.stream(CHAT, {**HI, "stop": stop})
        texts = [e["choices"][0]["delta"].get("content") for e in events]
        held = ["n", "e", "b"] if stop is None else ["neb"]
        assert texts == ["", "a", " ", *held, "é", None]


# -- echo and offsets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a<|im_start|>b", "a<|im_start|>b"),
        ([97, 269, 98], "a<|im_start|>b"),
        ([268, 98], "<|bos|>b"),
        ([97, 0xC3], "a\ufffd"),
        ("é🌍", "é🌍"),
    ],
)
def test_offsets_lead_to_the_tokens_text(prompt: Any, text: str) -> None:
    """Fault: control tokens of an echoed prompt, or half a character at its end, shift all offsets after them."""
    with Scripted(add_bos=True) as server:
        server.say([*b"xy\xa9", EOS])
        body = {"prompt": prompt, "echo": True, "logprobs": 0}
        (choice,) = server.whole(TEXT, body)["choices"]
        assert choice["text"] == text + "xy\ufffd"
        logprobs = choice["logprobs"]
        assert logprobs["text_offset"][-4:] == [len(text) + i for i in (0, 1, 2, 3)]
        for token, offset in zip(logprobs["tokens"][:-4], logprobs["text_offset"], strict=False):
            is_added = token == "<|bos|>" and isinstance(prompt, str)
            assert is_added or token.startswith("bytes:") or choice["text"].startswith(token, offset)


def test_ids_beyond_the_vocabulary_have_no_text(server: Scripted) -> None:
    """Fault: a model file pads its head, such an id ranks among the likeliest, and the answer is a 500."""
    server.say([97, 5000, EOS])
    whole = server.whole(CHAT, {**HI, "logprobs": True, "top_logprobs": 1})["choices"][0]
    assert whole["message"]["content"] == "a"
    assert [entry["bytes"] for entry in whole["logprobs"]["content"][:2]] == [[97], []]
    assert server.whole(TEXT, {"prompt": "a", "logprobs": 1})["choices"][0]["logprobs"]["tokens"][:2] == ["a", ""]


# -- when each event was sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_timestamps_tell_when_each_event_was_sent(server: Scripted, path: str) -> None:
    """Fault (CASES B14): a client cannot tell a slow model from a proxy that gathers events."""
    body = {**(HI if path == CHAT else {"prompt": "a"}), "stream": True}
    server.say([*b"Hello", EOS])
    stamped = {**body, "stream_options": {"include_timestamps": True}}
    for call in (server.call(path, body, x_chairlift_timestamps="1"), server.call(path, stamped)):
        stamps = [event["timestamps"] for event in call.events[:-1]]
        sent = [stamp["sent_s"] for stamp in stamps]
        assert sent == sorted(sent)
        made = [stamp["token_s"] for stamp in stamps[1 if path == CHAT else 0 :]]
        assert made == sorted(made)
        assert all(m <= s for m, s in zip(reversed(made), reversed(sent), strict=False))
    for call in (server.call(path, body), server.call(path, body, x_chairlift_timestamps="0")):
        assert b"timestamps" not in call.body


def test_the_timestamps_header_is_checked(server: Scripted) -> None:
    """Fault: "true" is taken for no."""
    for value in ("true", "", "2"):
        call = server.call(CHAT, HI, x_chairlift_timestamps=value)
        assert (call.status, call.json["error"]["param"]) == (400, "x-chairlift-timestamps")
