"""Small endpoints answer while somebody sends what is far too large."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from conftest import TinyGGUF
from process import Server, serving
from soak import latency, polling
from soak_cases import TEXT
from wire import exchange, request_bytes

WORDS = (Path(__file__).parent / "fixtures" / "english.txt").read_text(encoding="utf-8")
PROMPT_BYTES = 20_000_000
BOUND_MS = 500
"""On a machine of its own 200 hold; this one may be anybody's. What these tests guard against took 700 to 1,300."""


async def post_for(server: Server, seconds: float, body: bytes) -> set[int]:
    """The statuses of one request after the other."""
    end_s, statuses = time.monotonic() + seconds, set[int]()
    while not statuses or time.monotonic() < end_s:
        statuses.add((await exchange(server.port, request_bytes("POST", TEXT, body))).status)
    return statuses


@pytest.mark.parametrize("kind", ["words", "exponents"])
def test_health_answers_while_a_huge_prompt_is_refused(kind: str, tiny_gguf: TinyGGUF) -> None:
    """Fault (CASES A29, C2): a search over 20 MB holds the interpreter, and with it every probe."""
    prompt = {"words": WORDS * (PROMPT_BYTES // len(WORDS)), "exponents": "e123 " * (PROMPT_BYTES // 5)}[kind]
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    with serving(tiny_gguf(context=4096), "--body-limit-bytes", "30MB") as server:
        with polling(server.port) as times:
            assert asyncio.run(post_for(server, 2.0, body)) == {400}
        assert {path: latency(taken)["p99"] for path, taken in times.items() if latency(taken)["p99"] > BOUND_MS} == {}


def test_health_answers_while_a_body_of_a_million_lists_is_refused(tiny_gguf: TinyGGUF) -> None:
    """Fault: the collector of cycles looks at a million lists again and again while everything waits."""
    body = b'{"prompt":[' + b"[1]," * 1_000_000 + b"[1]]}"
    with serving(tiny_gguf(context=4096)) as server:
        with polling(server.port) as times:
            assert asyncio.run(post_for(server, 2.0, body)) == {400}
        assert {path: latency(taken)["p99"] for path, taken in times.items() if latency(taken)["p99"] > BOUND_MS} == {}
