"""The engine's own figures, from the pages of three servers."""

from __future__ import annotations

from math import inf

import pytest

from chairlift.bench.client import engine_metrics
from chairlift.bench.client.engine_metrics import EngineMetrics, Histogram, combined, difference, parse
from support.scripted_server import MockLLM, refusal, run_virtual


def page(prefix: str, num: int, *, ttft_sum: float = 0.0, preemptions: int = 0) -> str:
    """Chairlift's and vLLM's page after so many requests, with two labels to be summed."""
    return "\n".join(
        [
            f"# HELP {prefix}time_to_first_token_seconds Help.",
            f"# TYPE {prefix}time_to_first_token_seconds histogram",
            f'{prefix}time_to_first_token_seconds_bucket{{le="+Inf",stream="true"}} {num}',
            f'{prefix}time_to_first_token_seconds_count{{stream="true"}} {num}',
            f'{prefix}time_to_first_token_seconds_sum{{stream="true"}} {ttft_sum}',
            f'{prefix}time_to_first_token_seconds_count{{stream="false"}} {num}',
            f'{prefix}time_to_first_token_seconds_sum{{stream="false"}} {ttft_sum}',
            f"# TYPE {prefix}e2e_request_latency_seconds histogram",
            f"{prefix}e2e_request_latency_seconds_count {num}",
            f"{prefix}e2e_request_latency_seconds_sum {num * 2.0}",
            f"# TYPE {prefix}num_preemptions counter",
            f"{prefix}num_preemptions_total {preemptions}",
            f"# TYPE {prefix}prefix_cache_hits counter",
            f"{prefix}prefix_cache_hits_total {num * 16}",
            f"# TYPE {prefix}prefix_cache_queries counter",
            f"{prefix}prefix_cache_queries_total {num * 64}",
            f"# TYPE {prefix}num_requests_running gauge",
            f"{prefix}num_requests_running {num}",
            "process_cpu_seconds_total 5",
            "",
        ]
    )


LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {n}
# HELP llamacpp:prompt_seconds_total Prompt process time
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total {s}
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {n}
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
"""


@pytest.mark.parametrize("prefix", ["chairlift:", "vllm:"])
def test_figures_are_differences(prefix: str) -> None:
    """Totals since the server's start taken for this run's."""
    before, after = parse(page(prefix, 10, ttft_sum=7.0)), parse(page(prefix, 14, ttft_sum=9.0, preemptions=2))
    seen = difference(before, after)
    assert (seen.ttft, seen.e2e) == (Histogram(8, 4.0), Histogram(4, 8.0))
    assert seen.ttft is not None
    assert seen.ttft.mean_s == 0.5
    assert (seen.num_preemptions, seen.hit_rate) == (2, 0.25)


QUEUED = """\
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{le="0.5"}} {short}
vllm:request_queue_time_seconds_bucket{{le="2.0"}} {num}
vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {all}
vllm:request_queue_time_seconds_count {all}
vllm:request_queue_time_seconds_sum {sum}
"""


def test_waits_are_told_by_the_bounds_of_their_buckets() -> None:
    """A mean wait of nothing, with a tail that nobody shows; a bound of the buckets since the server's start."""
    before = parse(QUEUED.format(short=0, num=0, all=50, sum=500))
    seen = difference(before, parse(QUEUED.format(short=94, num=98, all=150, sum=540)))
    assert seen.queue is not None
    assert [seen.queue.bound_s(percent) for percent in (50, 94, 95, 98, 99, 100)] == [0.5, 0.5, 2, 2, inf, inf]
    both = combined([seen, seen]).queue
    assert both is not None
    assert (both.num, both.mean_s, both.bound_s(50), both.bound_s(95)) == (200, 0.4, 0.5, 2)
    assert Histogram(0, 0.0, ((0.5, 0), (inf, 0))).bound_s(50) is None
    assert Histogram(3, 1.0).bound_s(50) is None


def test_what_is_not_exported_is_not_zero() -> None:
    """ "Queue wait 0.0 s" on a server that does not say."""
    seen = difference(parse(page("vllm:", 1)), parse(page("vllm:", 2)))
    assert (seen.queue, seen.tpot, seen.num_output_tokens) == (None, None, None)
    assert difference(parse(""), parse("")) == EngineMetrics()


def test_llama_servers_names() -> None:
    """A server whose figures have other names, and no TTFT at all."""
    before, after = (parse(LLAMA.format(n=n, s=s)) for n, s in ((10, 1.0), (25, 1.5)))
    seen = difference(before, after)
    assert (seen.num_output_tokens, seen.prefill_s) == (15, 0.5)
    assert (seen.ttft, seen.e2e) == (None, None)


def test_a_restart_is_noticed() -> None:
    """Negative latencies, or none, after the server was restarted between two readings."""
    assert difference(parse(page("vllm:", 5)), parse(page("vllm:", 1))) == EngineMetrics(was_restarted=True)


def test_a_page_that_is_no_metrics() -> None:
    """A proxy's login page with status 200 that ends the run with a traceback."""
    assert parse("<html>\n<body class='x'> 5 5 5\n").values == {}


def test_a_mean_of_nothing_is_unknown() -> None:
    """A division by zero on an idle server."""
    assert Histogram(0, 0.0).mean_s is None


def test_stretches_are_summed() -> None:
    """A figure that one stretch lacks, counted as if it had been nothing there."""
    ttft = "vllm:time_to_first_token_seconds_count {}\nvllm:time_to_first_token_seconds_sum {}\n"
    one = difference(parse(""), parse(ttft.format(1, 2.0) + "vllm:prefix_cache_hits_total 3\n"))
    assert (one.ttft, one.num_prefix_hits) == (Histogram(1, 2.0), 3)
    both = combined([one, difference(parse(""), parse(ttft.format(2, 1.0)))])
    assert (both.ttft, both.num_prefix_hits) == (Histogram(3, 3.0), None)
    assert combined([]).ttft is None


def test_the_engine_may_count_a_moment_later() -> None:
    """A request whose last byte is here and which the engine has not counted yet."""
    pages = iter([1, 1, 1, 2, 2])

    async def test() -> None:
        mock = MockLLM(lambda *_: refusal(500), {"/metrics": lambda: page("vllm:", next(pages))})
        async with mock.client() as client:
            seen = await engine_metrics.scrape_until_counted(client, await engine_metrics.scrape(client))
        assert seen.e2e == Histogram(1, 2.0)

    run_virtual(test())


def test_one_who_never_counts_is_not_waited_for() -> None:
    """A refused request, which the engine never sees, that stops the run."""

    async def test() -> None:
        mock = MockLLM(lambda *_: refusal(500), {"/metrics": page("vllm:", 1)})
        async with mock.client() as client:
            seen = await engine_metrics.scrape_until_counted(client, await engine_metrics.scrape(client))
            assert client.clock.now_s() <= 1.0
        assert seen.e2e == Histogram(0, 0.0)

    run_virtual(test())


def test_no_page_is_no_figures() -> None:
    """Ollama, which has no /metrics."""

    async def test() -> None:
        async with MockLLM(lambda *_: refusal(500)).client() as client:
            assert await engine_metrics.scrape(client) == engine_metrics.MetricsSnapshot({})

    run_virtual(test())
