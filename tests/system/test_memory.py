"""Memory is constant after start: nothing keeps a part of a request that has ended, however it ended."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from conftest import TinyGGUF
from support.async_tests import run
from support.in_process_server import CHAT, HELLO, TEXT, Call, Gate, fake_app, is_at_rest, num_awaited, serving, until
from support.paths import FIXTURES
from support.server_process import serving as serving_process

WORDS = (FIXTURES / "english.txt").read_text(encoding="utf-8").split()
PROMPT_WORDS = 300
GROWTH_BYTES = 4 * 1024**2
"""For the allocator and the tokenizer's bounded cache of words: 1 to 2.5 MB were seen, and none after 1,000 prompts.
Five hundred prompts of some 1,700 tokens are 8 MB in their most compact form, a reference a token."""


def test_resident_memory_after_500_prompts_is_that_after_20(tiny_gguf: TinyGGUF) -> None:
    """Fault (CASES A9): the prefix cache, a log or a map grows with every prompt until the kernel ends the process."""
    path = tiny_gguf(context=4096)
    with (
        serving_process(path, "--max-num-seqs", "4", "--kv-memory", "4MiB") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(i: int) -> None:
            prompt = " ".join(random.Random(i).choices(WORDS, k=PROMPT_WORDS))
            answer = http.post(TEXT, json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
            assert answer.status_code == 200, answer.text

        list(pool.map(ask, range(20)))
        before = server.resident_bytes()
        list(pool.map(ask, range(20, 500)))
        assert server.resident_bytes() - before <= GROWTH_BYTES


def test_nothing_is_kept_of_a_request() -> None:
    """Fault: one dictionary entry, task or closure per request, that only weeks would show."""

    async def test() -> None:
        app = fake_app(max_num_seqs=4, max_queue=2, num_blocks=40)
        async with serving(app) as http:
            await every_way_to_end(app, http, range(20))
            before = census()
            await every_way_to_end(app, http, range(20, 80))
            grown = census() - before
            # The event loop drops cancelled timers, and the context each holds, a hundred at a time.
            for kind in ("asyncio.events.TimerHandle", "_contextvars.Context"):
                assert grown.pop(kind, 0) <= 100
            assert grown.total() < 60, grown.most_common(8)
            scheduler: Any = app.state.service.serving.engine._scheduler
            assert len(scheduler._cache) <= 40

    run(test())


WAYS_TO_END: dict[str, Any] = {
    "whole": {"prompt": "a" * 60, "max_tokens": 3},
    "choices": {"prompt": "a" * 60, "max_tokens": 3, "n": 3, "logprobs": 2, "seed": 1},
    "streamed": {"prompt": "a" * 60, "max_tokens": 3, "stream": True},
    "too long": {"prompt": "a b " * 200},
    "far too long": {"prompt": "a b " * 50_000},
    "no such model": {"prompt": "a", "model": "b"},
    "no JSON": b"{",
    "a name twice": b'{"prompt": "a", "prompt": "b"}',
    "failed": {"prompt": "a" * 60, "max_tokens": 400},
    "left": {"prompt": "a" * 60, "max_tokens": 400, "stream": True},
    "left, whole": {"prompt": "a" * 60, "max_tokens": 400},
}


@pytest.mark.parametrize("way", WAYS_TO_END)
def test_no_request_leaves_a_cycle(way: str) -> None:
    """Fault: an error holds a frame that holds the error, and both a body of 20 MB, until somebody looks for cycles."""

    async def end_one(app: Starlette, gate: Gate) -> None:
        call = Call(app, TEXT, WAYS_TO_END[way])
        if way.startswith("left"):
            await until(lambda: num_awaited(app) > 0)
            call.disconnect()
        if way == "failed":
            await until(lambda: num_awaited(app) > 0)
            gate.error = ValueError("broken kernel")
        await call.done()
        gate.error = None

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate)
        async with serving(app):
            await end_one(app, gate)
            await until(lambda: is_at_rest(app))
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    await end_one(app, gate)
                await until(lambda: is_at_rest(app))
                assert gc.collect() < 5
            finally:
                gc.enable()

    run(test())


def census() -> Counter[str]:
    """Objects alive by type, of those that may hold others."""
    gc.collect()
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


async def every_way_to_end(app: Starlette, http: httpx.AsyncClient, numbers: range) -> None:
    """For each number: a whole answer, choices, a stream, a client that leaves, refusals."""
    for i in numbers:
        fields = {"max_tokens": 5, "cache_salt": f"salt {i}"}
        prompt = f"prompt {i} " * 8
        assert (await http.post(TEXT, json={**fields, "prompt": prompt})).status_code == 200
        whole = await http.post(TEXT, json={**fields, "prompt": prompt, "n": 3, "seed": i, "logprobs": 2})
        assert whole.status_code == 200
        assert (await Call(app, CHAT, {**HELLO, "stream": True}).done()).events[-1] == "[DONE]"
        leaver = Call(app, TEXT, {"prompt": prompt, "max_tokens": 300, "stream": True})
        await leaver.until(lambda call: len(call.messages) > 1)
        leaver.disconnect()
        await leaver.done()
        assert (await http.post(CHAT, json={**HELLO, "model": f"model {i}"})).status_code == 404
        assert (await http.post(CHAT, content=f"{{{i}")).status_code in (400, 415)
        crowd = await asyncio.gather(*(http.post(TEXT, json={**fields, "prompt": f"{i} {k}"}) for k in range(9)))
        assert {answer.status_code for answer in crowd} <= {200, 503}
    await until(lambda: is_at_rest(app))
