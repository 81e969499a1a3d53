"""What the metrics must add up to: the real engine over the fake model, on a clock that only steps move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.applications import Starlette

from chairlift.config import Config
from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer
from chairlift.engine.request import FinishReason, Request
from chairlift.keys import ApiKey
from chairlift.plan import Plan
from chairlift.server.metrics import Metrics
from server.test_metrics import samples
from support.async_tests import run
from support.engine_probe import is_idle
from support.fake_model import FakeModel, alone, fake_plan, fake_request, wait_until
from support.in_process_server import CHAT, HELLO, TEXT, Call, Gate, fake_app, fake_loaded, metric, serving, until

STEP_S = 0.25
"""Of every step, in numbers that add up without rounding."""


class Firsts(Metrics):
    """Metrics that also notes each first token's time when it is told of it, and how often it is told."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.first_s: dict[Request, float] = {}

    def first_token(self, request: Request) -> None:
        assert request not in self.first_s, "told twice"
        self.first_s[request] = request.timing.first_token_s
        super().first_token(request)


@contextmanager
def engine_on(plan: Plan, observer: Observer) -> Iterator[Engine]:
    """An engine at work, whose clock moves by STEP_S in every step and not otherwise."""
    now_s = [100.0]

    def tick(_: Any) -> None:
        now_s[0] += STEP_S

    model = FakeModel(plan.num_blocks, before_run=tick)
    engine = Engine(plan, model, deliver=lambda _: None, observers=(observer,), clock=lambda: now_s[0])
    engine.warm_up()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def serve(plan: Plan, requests: Sequence[Request]) -> tuple[Firsts, dict[str, float]]:
    """Serves requests that come together; the metrics, and how they moved."""
    metrics = Firsts(plan)
    before = samples(metrics)
    with engine_on(plan, metrics) as engine:
        engine.submit(requests)
        wait_until(lambda: is_idle(engine))
    after = samples(metrics)
    return metrics, {name: after[name] - before[name] for name in after if not name.startswith(("process_", "cgroup_"))}


def total(moved: dict[str, float], name: str) -> float:
    """The sum over the `stream` label."""
    return sum(value for key, value in moved.items() if key.split("{")[0] == name)


def test_preemption_restarts_no_clock() -> None:
    """Fault (CASES C6, C8): TTFT counted again or from the second start; preempted time in no histogram."""
    plan = fake_plan(num_blocks=14, max_model_len=208, max_num_batched_tokens=32)
    requests = [fake_request(f"{i}", [40 + i] * (20 + 9 * i), max_tokens=40 + i) for i in range(6)]
    requests[0].stream = requests[3].stream = True
    metrics, moved = serve(plan, requests)
    assert moved["num_preemptions_total{}"] == sum(r.num_preemptions for r in requests) > 0
    assert any(r.num_preemptions and r.timing.first_token_s < r.timing.finished_s - 45 * STEP_S for r in requests)
    for request in requests:
        assert request.output == alone(request.prompt, len(request.output))
        assert metrics.first_s[request] == request.timing.first_token_s
    times = [r.timing for r in requests]
    assert total(moved, "time_to_first_token_seconds_count") == len(requests)
    assert total(moved, "time_to_first_token_seconds_sum") == sum(t.first_token_s - t.arrival_s for t in times)
    assert total(moved, "e2e_request_latency_seconds_sum") == sum(t.finished_s - t.arrival_s for t in times)
    assert moved["time_to_first_token_seconds_count{stream=true}"] == 2
    assert moved["request_success_total{finished_reason=length}"] == len(requests)


def test_queue_prefill_and_decode_meet_without_overlap() -> None:
    """Fault (CASES C6): the parts of a request's time overlap, leave gaps, or tokens are counted again in a replay."""
    plan = fake_plan(num_blocks=14, max_model_len=208, max_num_batched_tokens=32, max_num_seqs=3)
    requests = [fake_request(f"{i}", [40 + i] * (20 + 9 * i), max_tokens=1 + 9 * i) for i in range(6)]
    _, moved = serve(plan, requests)
    parts = [moved[f"request_{part}_time_seconds_sum{{}}"] for part in ("queue", "prefill", "decode")]
    assert sum(parts) == total(moved, "e2e_request_latency_seconds_sum")
    assert parts[0] + parts[1] == total(moved, "time_to_first_token_seconds_sum")
    assert total(moved, "inter_token_latency_seconds_sum") == parts[2]
    outputs = [len(r.output) for r in requests]
    assert total(moved, "inter_token_latency_seconds_count") == sum(outputs) - len(requests)
    assert moved["generation_tokens_total{}"] == moved["request_generation_tokens_sum{}"] == sum(outputs)
    assert moved["prompt_tokens_total{}"] == moved["request_prompt_tokens_sum{}"] == sum(r.num_prompt for r in requests)
    assert moved["request_time_per_output_token_seconds_count{}"] == sum(n > 1 for n in outputs)
    for part in ("queue", "prefill", "decode"):
        assert moved[f"request_{part}_time_seconds_count{{}}"] == len(requests)


def test_the_queue_is_part_of_the_first_token_and_of_nothing_else() -> None:
    """Fault (CASES C6): the server says 6 s and curl says minutes, because it began to count when it began to work."""
    plan = fake_plan(max_num_seqs=1, max_num_batched_tokens=16)
    first, second = fake_request("1", [65] * 16, max_tokens=100), fake_request("2", [66] * 64, max_tokens=1)
    _, moved = serve(plan, [first, second])
    assert second.timing.scheduled_s - second.timing.arrival_s == 100 * STEP_S
    assert second.timing.first_token_s - second.timing.scheduled_s == 4 * STEP_S
    assert moved["request_queue_time_seconds_sum{}"] == 100 * STEP_S
    assert moved["request_prefill_time_seconds_sum{}"] == (1 + 4) * STEP_S
    assert total(moved, "time_to_first_token_seconds_sum") == (1 + 104) * STEP_S


def test_every_step_is_in_the_histogram() -> None:
    """Fault: step times that nobody can see, or that are seen with the warm-up in them."""
    plan = fake_plan()
    metrics, requests = Metrics(plan), [fake_request("1", [65] * 100, max_tokens=10)]
    with engine_on(plan, metrics) as engine:
        engine.submit(requests)
        wait_until(lambda: is_idle(engine))
        num_steps = engine.snapshot().num_steps
    now = samples(metrics)
    assert now["step_time_seconds_count{}"] == num_steps == 2 + 9
    assert now["step_time_seconds_sum{}"] == num_steps * STEP_S
    assert now["iteration_tokens_total_sum{}"] == 100 + 9
    assert now["step_time_seconds_bucket{le=0.3}"] - now["step_time_seconds_bucket{le=0.2}"] == num_steps


def test_hits_found_after_the_first_step_are_counted() -> None:
    """Fault: what others computed meanwhile is cached in usage and not in the hit counter."""

    async def test() -> None:
        gate = Gate()
        loaded = fake_loaded(gate, max_num_batched_tokens=64)
        app = fake_app(loaded=loaded)
        async with serving(app):
            model: Any = loaded.model
            before = sum(model.rows_run)
            gate.close()
            fields = {"max_tokens": 2, "temperature": 0}
            long = Call(app, TEXT, {**fields, "prompt": [65] * 400})
            await gate.entered()
            short = Call(app, TEXT, {**fields, "prompt": [65] * 200})
            await until(lambda: app.state.service.snapshot().num_waiting == 1)
            gate.open()
            usages = [(await call.done()).json["usage"] for call in (long, short)]
            hits = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
            assert min(hits) > 0, "the long one has no hit after its first step: the test tests nothing"
            assert metric(app, 'prefix_cache_hits_total{model_name="fake"}') == sum(hits)
            assert sum(model.rows_run) - before == 600 - sum(hits) + 2

    run(test())


def test_a_prompt_that_ends_early_is_looked_up_once() -> None:
    """Fault: hits of requests that never had a first token are lost, or counted twice for those that had."""
    metrics = Metrics(fake_plan())
    request = fake_request("r#0", [1] * 40)
    request.num_cached, request.timing.scheduled_s = 16, 1.0
    request.finish_reason = FinishReason.CANCELLED
    metrics.finished(request)
    assert samples(metrics)["prefix_cache_hits_total{}"] == 16
    request.timing.first_token_s = 2.0
    metrics.finished(request)
    queued = fake_request("r#1", [1] * 40)
    queued.finish_reason = FinishReason.CANCELLED
    metrics.finished(queued)
    now = samples(metrics)
    assert (now["prefix_cache_queries_total{}"], now["prefix_cache_hits_total{}"]) == (40, 16)


async def scrape(http: httpx.AsyncClient) -> list[str]:
    """The lines that are ours."""
    lines = (await http.get("/metrics")).text.splitlines()
    return [
        line for line in lines if line.startswith("chairlift:") and "process_" not in line and "cgroup_" not in line
    ]


def test_scrapes_of_an_idle_server_are_equal() -> None:
    """Fault (CASES C4, C12): two scrapers steal each other's window; counters rise while nothing happens."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            await http.post(CHAT, json=HELLO)
            first = await scrape(http)
            assert all([await scrape(http) == first for _ in range(5)])

    run(test())


def test_no_request_adds_a_time_series() -> None:
    """Fault: a label that holds what clients send: the memory of the server and of Prometheus grows with them."""

    async def test() -> None:
        app: Starlette = fake_app(config=Config(api_key=(ApiKey.parse("sesame-open"),)), max_num_seqs=1, max_queue=0)
        async with serving(app) as http:
            before = {re.sub(r" \S+$", "", line) for line in await scrape(http)}
            key = {"authorization": "Bearer sesame-open"}
            for i in range(20):
                await http.post(CHAT, json={**HELLO, "model": f"model-{i}"}, headers=key)
                await http.post(CHAT, json={**HELLO, "user": f"user-{i}", "cache_salt": f"{i}"}, headers=key)
                await http.post(CHAT, json={**HELLO, "temperature": i + 5}, headers=key)
                await http.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {i}"})
                await http.post(CHAT, content=b"{" * i, headers={**key, "content-type": "application/json"})
                await http.get(f"/path-{i}", headers=key)
                await http.get(CHAT, headers=key)
            after = {re.sub(r" \S+$", "", line) for line in await scrape(http)}
            assert sorted(after - before) == []
            assert metric(app, 'requests_refused_total{model_name="fake",reason="model_not_found"}') == 20
            assert metric(app, 'requests_refused_total{model_name="fake",reason="queue_full"}') == 0

    run(test())
