"""What a soak asks: requests with one right answer, requests that are wrong, requests that carry a secret."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.paths import FIXTURES
from support.raw_http import Reply

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TEXTS = (FIXTURES / "english.txt").read_text(encoding="utf-8")
SHARED = TEXTS[1200:1500]
"""Where the prompts with a secret begin: the same blocks of KV for all of them."""
HUGE_BYTES = 20_000_000
BODY_LIMIT = 30_000_000


@dataclass(frozen=True)
class Case:
    """A request whose answer does not depend on who else is served."""

    path: str
    body: dict[str, Any]

    def request(self, **changes: Any) -> bytes:
        return json.dumps({**self.body, **changes}).encode()


def make_cases(choose: random.Random, count: int) -> list[Case]:
    """Short and long, greedy and seeded, with all that a sampler and an answer can be asked for."""
    return [_case(choose, i) for i in range(count)]


def _case(choose: random.Random, i: int) -> Case:
    start = choose.randrange(len(TEXTS) - 900)
    words = TEXTS[start : start + choose.choice((20, 60, 200, 400))]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": choose.choice((1, 8, 24, 60)), "ignore_eos": True}
    if i % 6 == 0:
        # The pool has no room for several of these: they preempt one another.
        body["max_tokens"] = 240
    if i % 3 == 1:
        body |= {"temperature": 0.9, "seed": choose.randrange(2**63), "top_p": 0.9, "top_k": 40}
    if i % 6 == 4:
        body |= {"n": choose.choice((2, 3)), "max_tokens": 24}
    if i % 7 == 2:
        body |= {"stop": [". ", "the", "\n"], "ignore_eos": False}
    if i % 8 == 3:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if i % 9 == 5:
        body |= {"logit_bias": {"65": 3, "66": -100}, "min_tokens": 1}
    if i % 2:
        if i % 4 == 1:
            body |= {"logprobs": True, "top_logprobs": 5}
        return Case(CHAT, {**body, "messages": [{"role": "user", "content": words}]})
    if i % 4 == 2:
        body |= {"logprobs": 3, "echo": i % 8 == 2}
    return Case(TEXT, {**body, "prompt": words})


def big_case(choose: random.Random) -> Case:
    """An answer of many bytes: what a slow reader must not be able to make the server keep."""
    case = _case(choose, 1)
    return Case(CHAT, {**case.body, "temperature": 0, "max_tokens": 240, "logprobs": True, "top_logprobs": 20})


def secret_case(secret: str) -> Case:
    """A prompt that wants its secret said again. The secret stands behind what all of them share, or before it: then
    blocks with equal tokens hold different keys and values."""
    first = f"The secret word is {secret}."
    parts = (SHARED, first) if int(secret, 16) % 2 else (first, SHARED)
    prompt = "\n".join((*parts, "I say it again: the secret word is"))
    return Case(TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": 12})


def huge_prompt() -> str:
    """20 MB of words, within the limit of bodies and far beyond that of prompts."""
    return TEXTS * (HUGE_BYTES // len(TEXTS))


def answer_of(case: Case, replies: Sequence[Any]) -> Any:
    """What must be equal, from one whole response or from the events of a stream: per choice text, log-probabilities
    and end."""
    found: dict[int, list[Any]] = {}
    for event in replies:
        for choice in event["choices"]:
            texts, logprobs, end = found.setdefault(choice["index"], [[], [], []])
            told = choice.get("message") or choice.get("delta") or {}
            texts.append(choice.get("text", "") if case.path == TEXT else told.get("content", ""))
            logprobs += _entries(choice["logprobs"])
            end += [choice["finish_reason"]] if choice["finish_reason"] else []
    return [("".join(found[i][0]), *found[i][1:]) for i in sorted(found)]


def _entries(logprobs: Any) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


def text_of(answer: Any) -> str:
    """All that an answer says, for a search."""
    return " ".join(choice[0] for choice in answer)


def parse_stream(body: bytes) -> list[Any]:
    """The events of a stream, "[DONE]" left out. Raises ValueError unless it is whole and without an error."""
    blocks = [block for block in body.decode("ascii").split("\n\n") if block and not block.startswith(":")]
    if blocks[-1:] != ["data: [DONE]"]:
        raise ValueError(f"a stream without an end: ...{body[-200:]!r}")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    for event in events:
        if "error" in event:
            raise ValueError(f"an error in a stream: {event['error']}")
    return events


# -- requests that are wrong ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Malformed:
    """A request that must be refused, and by which status."""

    status: int
    body: bytes
    path: str = CHAT
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()

    def is_right(self, reply: Reply) -> bool:
        if reply.status != self.status:
            return False
        error = reply.json["error"]
        return isinstance(error["message"], str) and isinstance(error["code"], str)


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}).encode()


def _text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hi", "max_tokens": 4, **fields}).encode()


_NOT_JSON = (b"", b"{", b'{"messages": [', b"\xff\xfe", b'{"messages": NaN}', b'{"temperature": 1e999}', b"[" * 50_000,
             b'{"a": "\\ud800"}', b'{"messages": ' + b"1" * 5000 + b"}", b"\x00" * 100)  # fmt: skip
_NOT_CHAT: tuple[bytes, ...] = (
    b"null", b"[]", b"7", b'"text"', b"{}", b'{"messages": 5}', b'{"messages": []}', b'{"messages": [5]}',
    b'{"messages": [{}]}', b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": 5, "content": "x"}]}',
    _chat(temperature=3), _chat(temperature="hot"), _chat(top_p=-1), _chat(max_tokens=0), _chat(max_tokens=-1),
    _chat(n=0), _chat(n=1000), _chat(stop=5), _chat(stop=[""] * 3), _chat(stop=["a"] * 100),
    _chat(seed=2**70), _chat(logit_bias={"x": 1}), _chat(logit_bias={"999999999": 1}), _chat(top_logprobs=21),
    _chat(stream="yes"), _chat(tools=[{"type": "function"}]), _chat(response_format={"type": "json_object"}),
    _chat(messages=[{"role": "user", "content": "word " * 2000}]), _chat(stream_options=5), _chat(cache_salt=""),
)  # fmt: skip
_NOT_TEXT: tuple[bytes, ...] = (
    b"{}", b'{"prompt": null}', b'{"prompt": []}', b'{"prompt": {}}', _text(prompt=""), _text(prompt=[-1]),
    _text(prompt=[10**9]), _text(prompt=[[1], ["a"]]), _text(prompt=["a"] * 1000), _text(max_tokens=0),
    _text(logprobs=100), _text(prompt=[1] * 5000), _text(suffix="x"), _text(best_of=5),
)  # fmt: skip

MALFORMED: tuple[Malformed, ...] = (
    *(Malformed(400, body) for body in (*_NOT_JSON, *_NOT_CHAT)),
    *(Malformed(400, body, TEXT) for body in (*_NOT_JSON, *_NOT_TEXT)),
    Malformed(404, _chat(model="gpt-5")),
    Malformed(404, _chat(), "/v1/chat/completion"),
    Malformed(404, b"", "/v1/models/none", "GET"),
    Malformed(405, b"", CHAT, "GET"),
    Malformed(405, b"", "/health", "DELETE"),
    Malformed(413, b"", headers=(("content-length", str(BODY_LIMIT + 1)),)),
    Malformed(413, b"", headers=(("content-length", "9" * 15),)),
    Malformed(415, _chat(), headers=(("content-type", "text/plain"),)),
    Malformed(415, _chat(), headers=(("content-type", ""),)),
    Malformed(401, _chat(), headers=(("authorization", "Bearer wrong-key"),)),
    Malformed(401, _chat(), headers=(("authorization", "Basic eDp5"),)),
    Malformed(401, _chat(), headers=(("authorization", ""),)),
)
GARBAGE = (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01")
"""What is no HTTP at all. Any answer will do, or none, as long as the server lives."""
