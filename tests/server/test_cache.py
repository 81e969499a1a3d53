"""The prefix cache as clients and operators see it: what it saves, what it says it saves, and what it must never do."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from chairlift.boot import Loaded
from support.async_tests import run
from support.fake_model import FakeModel, alone
from support.in_process_server import TEXT, fake_loaded, is_at_rest, metric, serving, until
from support.in_process_server import fake_app as app_on

PRINTABLE = range(33, 127)


def letters(choose: random.Random, num_tokens: int) -> list[int]:
    return choose.choices(PRINTABLE, k=num_tokens)


def text_alone(loaded: Loaded, prompt: list[int], num_tokens: int) -> str:
    """What a prompt is answered without any engine."""
    said = b"".join(loaded.tokenizer.vocab_bytes[token] for token in alone(prompt, num_tokens))
    return said.decode("utf-8", "replace")


async def ask(http: httpx.AsyncClient, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Any:
    """The body of the answer to a greedy completion."""
    answer = await http.post(TEXT, json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_rows(loaded: Loaded) -> int:
    """Rows that the model has computed so far."""
    assert isinstance(loaded.model, FakeModel)
    return sum(loaded.model.rows_run)


def counted(app: Starlette, *names: str) -> list[float]:
    return [metric(app, f'{name}_total{{model_name="fake"}}') for name in names]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 49])
def test_a_full_hit_is_the_same_answer_and_the_same_prompt(length: int) -> None:
    """Fault (CASES A7): a whole-prompt hit changes the text at a block's edge, or the count of prompt tokens."""

    async def test() -> None:
        loaded = fake_loaded()
        app = app_on(loaded=loaded)
        async with serving(app) as http:
            prompt = letters(random.Random(length), length)
            cold, warm = [await ask(http, prompt) for _ in range(2)]
            assert cold["choices"] == warm["choices"]
            assert cold["choices"][0]["text"] == text_alone(loaded, prompt, 4)
            assert cold["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"] == length
            assert (cached(cold), cached(warm)) == (0, (length - 1) // 16 * 16)
            assert counted(app, "prompt_tokens") == [2 * length]

    run(test())


def test_a_b_a_keeps_a() -> None:
    """Fault (CASES A8): a cache that only works with the last prompt."""

    async def test() -> None:
        app = app_on()
        async with serving(app) as http:
            a, b = letters(random.Random(1), 100), letters(random.Random(2), 100)
            assert [cached(await ask(http, prompt)) for prompt in (a, b, a, b)] == [0, 0, 96, 96]

    run(test())


@pytest.mark.parametrize("budget", [64, 512])
def test_five_together_are_computed_once_and_counted_right(budget: int) -> None:
    """Fault: a common prefix is computed by each; usage, hit counter and the rows that ran tell three stories.

    In steps of 64 tokens the later requests find most of the prefix long after their own first step.
    """

    async def test() -> None:
        loaded = fake_loaded(max_num_batched_tokens=budget)
        app = app_on(loaded=loaded)
        async with serving(app) as http:
            before = num_rows(loaded)
            prefix = letters(random.Random(0), 320)
            prompts = [prefix + letters(random.Random(i), 30) for i in range(1, 6)]
            bodies = await asyncio.gather(*(ask(http, prompt) for prompt in prompts))
            assert [body["choices"][0]["text"] for body in bodies] == [text_alone(loaded, p, 4) for p in prompts]
            assert sum(map(cached, bodies)) == 4 * 320
            assert num_rows(loaded) - before == 320 + 5 * (30 + 4 - 1)
            assert counted(app, "prefix_cache_queries", "prefix_cache_hits") == [5 * 350, 4 * 320]
            assert counted(app, "prompt_tokens") == [5 * 350]

    run(test())


def test_counters_agree_with_usage_whatever_is_asked() -> None:
    """Fault: choices, scored prompts or repeated ones counted in one place and not in the other."""

    async def test() -> None:
        loaded = fake_loaded(max_num_batched_tokens=48)
        app = app_on(loaded=loaded)
        async with serving(app) as http:
            before = num_rows(loaded)
            a, b = letters(random.Random(1), 70), letters(random.Random(2), 90)
            asked: list[tuple[list[int], dict[str, Any]]] = [
                (a, {}), (a, {"n": 3}), (b, {"echo": True, "logprobs": 0, "max_tokens": 0}), (b, {}), (b, {"n": 2}),
            ]  # fmt: skip
            bodies = [await ask(http, prompt, **{"max_tokens": 5, **fields}) for prompt, fields in asked]
            choices = [fields.get("n", 1) for _, fields in asked]
            queried = sum(n * len(prompt) for n, (prompt, _) in zip(choices, asked, strict=True))
            queries, hits = counted(app, "prefix_cache_queries", "prefix_cache_hits")
            assert queries == queried
            assert hits == sum(n * cached(body) for n, body in zip(choices, bodies, strict=True))
            outputs = [body["usage"]["completion_tokens"] for body in bodies]
            decoded = sum(max(0, out - n) for n, out in zip(choices, outputs, strict=True))
            assert num_rows(loaded) - before == queries - hits + decoded
            assert counted(app, "prompt_tokens") == [sum(len(prompt) for prompt, _ in asked)]
            assert counted(app, "generation_tokens") == [sum(outputs)]

    run(test())


@pytest.mark.parametrize("num_blocks", [58, 11], ids=["2-to-spare", "preempting"])
def test_fifty_secrets_stay_where_they_belong(num_blocks: int) -> None:
    """Fault (CASES A6): one's words in another's answer, once blocks are evicted and used again.

    Eight run at once, each with seven blocks, shared or its own: 56. The answer is a function of every token that a
    request sees, so that a single foreign one changes it.
    """

    async def test() -> None:
        loaded = fake_loaded(max_queue=50, num_blocks=num_blocks, max_model_len=160)
        app = app_on(loaded=loaded)
        async with serving(app) as http:
            shared = letters(random.Random(0), 64)
            secrets = [letters(random.Random(i), 16) for i in range(1, 51)]
            # The secret stands before what all share in every third: equal tokens, other keys and values.
            prompts = [s + shared if i % 3 == 0 else shared + s for i, s in enumerate(secrets)]
            before = num_rows(loaded)
            bodies = await asyncio.gather(*(ask(http, prompt, 30) for prompt in prompts))
            for prompt, body in zip(prompts, bodies, strict=True):
                assert body["choices"][0]["text"] == text_alone(loaded, prompt, 30)
                assert cached(body) in (0, 16, 32, 48, 64)
            assert sum(map(cached, bodies)) >= 20 * 64
            assert num_rows(loaded) - before < 50 * (80 + 29)
            assert (metric(app, 'num_preemptions_total{model_name="fake"}') > 0) == (num_blocks == 11)
            await until(lambda: is_at_rest(app))
            again = await ask(http, prompts[1], 30)
            assert again["choices"] == bodies[1]["choices"]
            assert cached(again) < 80 - 1, "nothing of its own was evicted: the pool was not tight"

    run(test())
