"""/metrics: the right numbers under the right names, whatever happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.engine.observer import EngineSnapshot, StepStats
from chairlift.engine.request import FinishReason, Request
from chairlift.server.metrics import Metrics, throttling
from support.async_tests import run
from support.fake_model import fake_plan, fake_request
from support.in_process_server import CHAT, HELLO, Call, fake_app, serving

NAMES = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "step_time_seconds",
    "step_overhead_seconds",
    "iteration_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "kv_pool_tokens",
    "kv_pool_bytes",
    "max_num_seqs",
    "max_queue",
    "max_model_len",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "requests_cancelled",
    "requests_failed",
    "steps_failed",
    "stalls",
    "process_major_page_faults",
    "cgroup_cpu_throttled_periods",
    "cgroup_cpu_throttled_seconds",
]


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{labels without model_name}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name.removeprefix('chairlift:')}{{{labels}}}"] = sample.value
    return found


def moved(before: dict[str, float], after: dict[str, float], *names: str) -> dict[str, float]:
    return {name: after[name] - before[name] for name in names}


def finished(reason: FinishReason = FinishReason.LENGTH, *, num_output: int = 3, stream: bool = True) -> Request:
    """A request with stamps: arrival 10, first step 12, first token 15, last token 19, end 19.5."""
    request = fake_request("r#0", [1] * 40)
    request.stream = stream
    request.num_cached = 16
    request.output = [1] * num_output
    request.finish_reason = reason
    timing = request.timing
    timing.arrival_s, timing.scheduled_s = 10.0, 12.0
    timing.first_token_s, timing.last_token_s, timing.finished_s = 15.0, 19.0, 19.5
    return request


def step(**changes: Any) -> StepStats:
    fields = {
        "seconds": 0.05, "overhead_s": 0.001, "num_rows": 40, "num_prompt_tokens": 38,
        "num_running": 1, "num_waiting": 0, "num_used_blocks": 3, "num_blocks": 64, "predicted_s": 0.05,
    }  # fmt: skip
    return StepStats(**{**fields, **changes})


def test_every_name_is_there_before_the_first_request() -> None:
    """Fault: a dashboard shows "no data" until something has gone wrong once."""
    text = Metrics(fake_plan()).exposition().decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert [name for name in NAMES if f"chairlift:{name}" not in families] == []
    zeroed = samples(Metrics(fake_plan()))
    for reason in ("stop", "length"):
        assert zeroed[f"request_success_total{{finished_reason={reason}}}"] == 0
    for phase in ("preparing", "queued", "prefill", "decode"):
        assert zeroed[f"requests_cancelled_total{{phase={phase}}}"] == 0
    assert "_created" not in text


def test_two_servers_share_nothing() -> None:
    """Fault: a registry of the whole process, in which a second server collides with the first."""
    one, other = Metrics(fake_plan()), Metrics(fake_plan())
    one.preempted(fake_request("r#0", [1]))
    assert samples(one)["num_preemptions_total{}"] == 1
    assert samples(other)["num_preemptions_total{}"] == 0


def test_a_request_is_timed_from_its_arrival() -> None:
    """Fault (CASES C6): TTFT leaves out the queue; queue, prefill and decode overlap or leave gaps."""
    metrics, request = Metrics(fake_plan()), finished()
    metrics.admitted(request)
    metrics.first_token(request)
    metrics.next_tokens([(request, 1.5), (request, 2.5)])
    metrics.finished(request)
    now = samples(metrics)
    assert now["request_queue_time_seconds_sum{}"] == 2.0
    assert now["request_prefill_time_seconds_sum{}"] == 3.0
    assert now["time_to_first_token_seconds_sum{stream=true}"] == 5.0
    assert now["request_decode_time_seconds_sum{}"] == 4.0
    assert now["request_time_per_output_token_seconds_sum{}"] == 2.0
    assert now["inter_token_latency_seconds_sum{stream=true}"] == 4.0
    assert now["inter_token_latency_seconds_count{stream=true}"] == 2
    assert now["e2e_request_latency_seconds_sum{stream=true}"] == 9.5
    assert now["time_to_first_token_seconds_count{stream=false}"] == 0
    assert (now["prompt_tokens_total{}"], now["prefix_cache_queries_total{}"]) == (40, 40)
    assert now["prefix_cache_hits_total{}"] == 16
    assert now["request_success_total{finished_reason=length}"] == 1


def test_one_token_has_no_time_per_token() -> None:
    """Fault (CASES C9): a division by zero, or a zero that pulls the mean down."""
    metrics = Metrics(fake_plan())
    metrics.finished(finished(num_output=1))
    metrics.finished(finished(num_output=0))
    now = samples(metrics)
    assert now["request_time_per_output_token_seconds_count{}"] == 0
    assert now["request_decode_time_seconds_count{}"] == 1
    assert now["e2e_request_latency_seconds_count{stream=true}"] == 2


def test_those_who_leave_or_fail_do_not_flatter() -> None:
    """Fault: a request cancelled after a second counts as an answer in one second."""
    metrics = Metrics(fake_plan())
    queued, prefill, decode = (finished(FinishReason.CANCELLED) for _ in range(3))
    queued.timing.scheduled_s = queued.timing.first_token_s = prefill.timing.first_token_s = 0.0
    for request in (queued, prefill, decode, finished(FinishReason.ERROR)):
        metrics.finished(request)
    now = samples(metrics)
    assert now["e2e_request_latency_seconds_count{stream=true}"] == 0
    assert [now[f"requests_cancelled_total{{phase={p}}}"] for p in ("queued", "prefill", "decode")] == [1, 1, 1]
    assert now["requests_failed_total{}"] == 1
    assert now["request_success_total{finished_reason=length}"] == 0


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    """Fault: prompt_tokens_total disagrees with the usage that clients see."""
    metrics = Metrics(fake_plan())
    for choice in range(3):
        request = fake_request(f"r#{choice}", [1] * 40, choice=choice)
        metrics.admitted(request)
        metrics.first_token(request)
    assert samples(metrics)["prompt_tokens_total{}"] == 40
    assert samples(metrics)["prefix_cache_queries_total{}"] == 120


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("time_to_first_token_seconds", 599), ("e2e_request_latency_seconds", 1799), ("inter_token_latency_seconds", 9.9)],
)
def test_buckets_reach_minutes(name: str, seconds: float) -> None:
    """Fault (CASES C7): everything slow falls into +Inf, and a quantile of it is made up."""
    metrics, request = Metrics(fake_plan()), finished()
    request.timing.first_token_s = request.timing.finished_s = 10.0 + seconds
    metrics.first_token(request)
    metrics.next_tokens([(request, seconds)])
    metrics.finished(request)
    buckets = {k: v for k, v in samples(metrics).items() if k.startswith(name + "_bucket") and "stream=true" in k}
    finite = [value for key, value in buckets.items() if "+Inf" not in key]
    assert max(finite) == 1
    assert len(finite) >= 15


def test_scrapes_change_nothing() -> None:
    """Fault (CASES C4, C12): a gauge that resets when read; a counter fed with totals."""
    metrics = Metrics(fake_plan())
    metrics.step_done(step())
    first = {k: v for k, v in samples(metrics).items() if not k.startswith(("process_", "cgroup_"))}
    for _ in range(3):
        again = samples(metrics)
        assert {k: again[k] for k in first} == first
    metrics.step_done(step(num_rows=5, overhead_s=0.0))
    now = samples(metrics)
    assert moved(first, now, "iteration_tokens_total_sum{}", "step_time_seconds_count{}") == {
        "iteration_tokens_total_sum{}": 5,
        "step_time_seconds_count{}": 1,
    }
    assert moved(first, now, "step_overhead_seconds_count{}") == {"step_overhead_seconds_count{}": 0}


def test_gauges_are_what_the_engine_says_now() -> None:
    """Fault: a gauge keeps the last step's value when nothing runs any more."""
    metrics, now = Metrics(fake_plan()), EngineSnapshot(3, 2, 16, 64, 9, 1, 0.1)
    metrics.watch(lambda: now)
    busy = samples(metrics)
    assert (busy["num_requests_running{}"], busy["num_requests_waiting{}"]) == (3, 2)
    assert busy["kv_cache_usage_perc{}"] == 0.25
    now = EngineSnapshot(0, 0, 0, 64, 9, 1, 5.0)
    assert samples(metrics)["num_requests_running{}"] == 0
    assert busy["kv_pool_tokens{}"] == 1024
    assert (busy["max_num_seqs{}"], busy["max_queue{}"], busy["max_model_len{}"]) == (8, 16, 512)


def test_throttling_is_read_from_either_cgroup_version(tmp_path: Path) -> None:
    """Fault (CASES A21): a container's quota slows everything and nothing says so."""
    assert throttling(tmp_path) == (0, 0, 0.0)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.stat").write_text("nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000\n")
    assert throttling(tmp_path) == (10, 4, 2.5)
    (tmp_path / "cpu.stat").write_text("usage_usec 1\nnr_periods 7\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert throttling(tmp_path) == (7, 3, 1.5)
    (tmp_path / "cpu.stat").write_text("usage_usec 1\nuser_usec 1\n")
    assert throttling(tmp_path) == (0, 0, 0.0)


def test_the_exposition_over_http() -> None:
    """Fault: counts disagree with the requests that were made; a refusal is not counted."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            for _ in range(3):
                await http.post(CHAT, json=HELLO)
            await Call(app, CHAT, {**HELLO, "stream": True}).done()
            await http.post(CHAT, json={**HELLO, "model": "nope"})
            answer = await http.get("/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            now = samples(app.state.service.serving.metrics)
            assert now["time_to_first_token_seconds_count{stream=false}"] == 3
            assert now["time_to_first_token_seconds_count{stream=true}"] == 1
            assert now["e2e_request_latency_seconds_count{stream=false}"] == 3
            assert now["request_success_total{finished_reason=length}"] == 4
            assert now["prompt_tokens_total{}"] == 4 * 22
            assert now["generation_tokens_total{}"] == 4 * 8
            assert now["requests_refused_total{reason=model_not_found}"] == 1
            assert re.search(r'^chairlift:num_requests_running\{model_name="fake"\} 0\.0$', answer.text, re.MULTILINE)

    run(test())
