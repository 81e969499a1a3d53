"""Figures from samples: percentiles, stalls, goodput, throughput and the warnings that keep them honest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.bench.client.sample import Event, EventKind, Failure, Sample
from chairlift.bench.client.target import ServerKind, Target
from chairlift.bench.load.arrivals import ClosedLoop, OpenLoop
from chairlift.bench.load.doubts import Doubt, doubts
from chairlift.bench.load.generator import Attempt, RunLimits, WarmUp, Window
from chairlift.bench.load.goodput import Slo
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.summary import Little, LoadSummary, Stalls, stalls, summarise, tokens_over_time
from chairlift.bench.load.workload import Lengths, PlannedRequest, SharedPrefix, TokenCalibration, Workload
from chairlift.bench.report.stats import Spread, percentile
from chairlift.errors import ConfigError
from support.scripted_server import run_virtual as run
from support.virtual_engine import WORK, VirtualEngine, measure, sample

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)
EVENLY = OpenLoop(1, is_poisson=False)


def window_of(*samples: Sample, asked: int = 3, begin_s: float = 0.0, end_s: float = 10.0, others: int = 0) -> Window:
    """The last `others` of the samples are not measured."""
    attempts = [Attempt(PlannedRequest(i, "x", 10, asked), each, False) for i, each in enumerate(samples)]
    cut = len(attempts) - others
    return Window(ClosedLoop(1), tuple(attempts[:cut]), tuple(attempts[cut:]), begin_s, end_s, WarmUp(0, True, ""))


def names(found: Sequence[Doubt]) -> set[str]:
    return {doubt.name for doubt in found}


def found_in(
    window: Window, work: Workload = WORK, *, one_stream_ceiling: float | None = None, is_cache_wanted: bool = False
) -> set[str]:
    spec = RunSpec(work, window.arrivals, RunLimits(), is_cache_wanted=is_cache_wanted)
    card = {"one_stream_ceiling_tokens_per_s": one_stream_ceiling}
    target = Target("http://mock", kind=ServerKind.CHAIRLIFT, card=card)
    return names(doubts(summarise(window), window, spec, target))


# -- percentiles ------------------------------------------------------------------------------------------------------


@given(VALUES, st.sampled_from([1, 50, 90, 95, 99, 100]))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], percent: int) -> None:
    """Interpolated percentiles that no request ever had, or ranks that are off by one."""
    ordered = sorted(values)
    value = percentile(ordered, percent)
    assert value in values
    assert sum(each <= value for each in values) * 100 >= percent * len(values)
    assert sum(each < value for each in values) * 100 < percent * len(values)


@given(VALUES)
def test_a_spread_is_in_order(values: list[float]) -> None:
    """A p99 below the p95, or a mean outside of the values."""
    spread = Spread.of(values)
    assert spread is not None
    assert spread.p50 <= spread.p95 <= spread.p99 <= spread.max == max(values)
    assert min(values) <= spread.mean * (1 + 1e-9) + 1e-9
    assert spread.mean <= spread.max * (1 + 1e-9)
    assert spread.is_max(99) == (spread.p99 == spread.max) or values.count(max(values)) > 1


def test_a_p99_of_few_values_says_what_it_is() -> None:
    """ "p99" over twenty requests, which is the slowest of them by another name."""
    few, many = Spread.of(range(20)), Spread.of(range(100))
    assert few is not None
    assert many is not None
    assert (few.as_dict()["is_p99_the_max"], few.as_dict()["is_p95_the_max"]) == (True, False)
    assert many.as_dict()["is_p99_the_max"] is False
    assert (many.p99, many.max) == (98, 99)


def test_no_values_have_no_figures() -> None:
    """A 0.000 s in a table, where nothing was measured."""
    assert Spread.of([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


# -- one stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.1, 0.1, 1.5, 0.1), (1.5,)),
        ((0.1, 0.1, 0.9, 0.1), ()),  # long, but under a second
        ((0.5, 0.5, 1.5, 0.5), ()),  # a slow stream is not a stalled one
        ((0.2, 0.2, 0.2, 1.0), ()),  # not over a second
        ((0.1, 0.1, 0.1, 3.0, 2.0), (3.0, 2.0)),
        ((), ()),
    ],
)
def test_a_stall_is_long_and_unlike_its_stream(gaps: tuple[float, ...], expected: tuple[float, ...]) -> None:
    """A slow but even stream called stalled, or a hang of seconds lost among thousands of gaps."""
    assert stalls(gaps) == expected


def test_stalls_are_counted_by_stream() -> None:
    """One unlucky user with five stalls looks like five users with one."""
    smooth, hit = sample(1.0, 1.1, 1.2), sample(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 4.5, 4.6, 6.6)
    failed = replace(hit, failure=Failure.CLOSED_EARLY)
    found = Stalls.of([smooth, hit, sample(3.0)])
    assert found == Stalls(2, 1, 2, found.longest_s)
    assert found.longest_s == pytest.approx(3.0)
    assert summarise(window_of(failed)).stalls.num == 2, "a stall is often why a request failed"


def test_the_role_chunk_is_no_token_and_reasoning_is_not_visible() -> None:
    """A first token after 0 s because the server said who speaks; an answer that seems to take three minutes to begin
    since its thinking counted for nothing."""
    events = (
        Event(0.0, EventKind.ROLE),
        Event(1.0, EventKind.PING),
        Event(2.0, EventKind.REASONING),
        Event(3.0, EventKind.REASONING),
        Event(5.0, EventKind.TEXT),
    )
    summary = summarise(window_of(Sample(0, 0.0, 0.0, 5.5, True, events, num_output_tokens=3)))
    assert summary.ttft_s is not None
    assert summary.visible_s is not None
    assert summary.itl_s is not None
    assert (summary.ttft_s.max, summary.visible_s.max, summary.itl_s.num, summary.itl_s.max) == (2.0, 5.0, 2, 2.0)


def test_tokens_come_from_usage_where_pieces_hold_several() -> None:
    """Throughput by pieces: a quarter of the truth for a server that sends four tokens at once."""
    four = sample(1.0, 2.0, 3.0, num_tokens=12)
    assert tokens_over_time(four) == [(1.0, 4.0), (2.0, 4.0), (3.0, 4.0)]
    window = window_of(four, begin_s=1.0, end_s=3.0, asked=12)
    assert summarise(window).capacity.output_tokens_per_s == 4.0
    assert summarise(window).tokens_per_event == 4.0
    assert "several tokens a piece" in found_in(window)
    said = replace(four, events=tuple(replace(e, num_tokens=n) for e, n in zip(four.events, (1, 1, 10), strict=True)))
    assert tokens_over_time(said) == [(1.0, 1.0), (2.0, 1.0), (3.0, 10.0)], "the server's own count comes first"


def test_without_usage_tokens_are_called_estimated() -> None:
    """A guess in the same column as a count."""
    silent = replace(sample(1.0, 2.0), num_output_tokens=None, num_prompt_tokens=None)
    window = window_of(silent)
    assert tokens_over_time(silent) == [(1.0, 1.0), (2.0, 1.0)]
    assert {"tokens estimated", "lengths unknown"} <= found_in(window)


def test_without_streaming_there_is_no_first_token() -> None:
    """TTFT = E2E for a request that was not streamed, in a table beside those that were."""
    whole = Sample(0, 0.0, 0.0, 4.0, False, num_prompt_tokens=10, num_output_tokens=8)
    summary = summarise(window_of(whole, asked=8))
    assert (summary.ttft_s, summary.itl_s, summary.tpot_s) == (None, None, None)
    assert summary.capacity.output_tokens_per_s == pytest.approx(0.8)


# -- all together -----------------------------------------------------------------------------------------------------


def test_only_the_window_counts_for_throughput() -> None:
    """Tokens before and after, or those of a stream that began in warm-up left out: both bend tokens/s."""
    early = sample(*range(0, 6), due_s=0.0)  # tokens at 0..5, of which 3, 4, 5 are inside
    inside = sample(4.0, 5.0, 6.0, due_s=3.0)
    late = sample(6.0, 7.0, 8.0, due_s=5.0)
    summary = summarise(window_of(inside, early, late, begin_s=2.0, end_s=7.0, others=2))
    assert summary.capacity.output_tokens_per_s == pytest.approx((3 + 3 + 2) / 5)
    assert summary.capacity.prompt_tokens_per_s == pytest.approx((10 + 10) / 5), "the early one was read before"
    assert summary.capacity.requests_per_s == pytest.approx(2 / 5)
    assert summary.capacity.mean_in_flight == pytest.approx((3 + 3 + 2) / 5)
    assert summary.e2e_s is not None
    assert summary.e2e_s.num == 1, "but only measured requests have latencies"


def test_goodput_counts_what_kept_every_promise() -> None:
    """A fast first token and a crawl behind it counted as good; failures left out of the share."""
    good = sample(0.5, 0.6, 0.7)
    late, slow = sample(1.5, 1.6, 1.7), sample(0.5, 1.0, 1.5)
    failed = replace(good, failure=Failure.ERROR_EVENT)
    summary = summarise(window_of(good, late, slow, failed), Slo.parse("ttft=1,itl=0.2"))
    assert summary.goodput is not None
    assert (summary.goodput.num_met, summary.goodput.share) == (1, 0.25)
    assert summary.goodput.requests_per_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft=0.5", True), ("ttft=0.49", False), ("visible=0.5", True), ("itl=0.1", False), ("itl=0.25", True),
        ("tpot=0.16", True), ("tpot=0.14", False), ("e2e=0.8,ttft=0.5", True), ("e2e=0.79", False),
    ],
)  # fmt: skip
def test_each_objective_is_checked(slo: str, met: bool) -> None:
    """An objective that is read and ignored."""
    assert Slo.parse(slo).is_met(sample(0.5, 0.75, 0.8, num_tokens=3)) == met


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "latency=1", "ttft=1;itl=2", "ttft=-1"])
def test_an_objective_that_is_none_is_refused(text: str) -> None:
    """A misspelt objective that every request meets."""
    with pytest.raises(ConfigError):
        Slo.parse(text)


def test_a_first_token_that_cannot_be_seen_meets_nothing() -> None:
    """Goodput of 100 % because nothing was measured."""
    assert not Slo.parse("ttft=100").is_met(Sample(0, 0.0, 0.0, 1.0, False, num_output_tokens=4))


def test_little_is_arithmetic() -> None:
    """The law with a term missing: users / latency, as if nobody thought."""
    little = Little(users=10, mean_think_s=4.0, mean_latency_s=1.0, measured_requests_per_s=1.9)
    assert little.expected_requests_per_s == 2.0
    assert little.ratio == pytest.approx(0.95)


def test_the_document_is_json() -> None:
    """An infinity or a tuple in the JSON, which half of the readers refuse."""
    import json

    failed = replace(sample(0.5), failure=Failure.of_status(503))
    said = summarise(window_of(failed, sample(0.5, 0.6)), Slo.parse("ttft=1")).as_dict()
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert (said["num_503"], said["num_failed"], said["e2e_with_failures_s"]["max"]) == (1, 1, None)


# -- what makes them doubtful -----------------------------------------------------------------------------------------


def test_a_clean_run_has_no_warnings() -> None:
    """Warnings on every run, which nobody reads."""
    window = run(measure(VirtualEngine(first_s=0.5, gap_s=0.05, num_cached=0), EVENLY, RunLimits(100)))
    assert found_in(window, one_stream_ceiling=25.0) == set()


def test_failures_are_a_warning_above_one_percent() -> None:
    """Latencies of the lucky half, printed as if there were no other."""
    mixed = VirtualEngine(fate=lambda number: Failure.HTTP_503 if number % 5 == 0 else None)
    assert "failures" in found_in(run(measure(mixed, EVENLY, RunLimits(100, warmup=0))))
    rare = VirtualEngine(fate=lambda number: Failure.HTTP_503 if number == 7 else None)
    assert "failures" not in found_in(run(measure(rare, EVENLY, RunLimits(100, warmup=0))))


def test_a_warm_prefix_cache_is_flagged() -> None:
    """The second run of the same benchmark is 49 times as fast: its prompts were still there."""
    warm = run(measure(VirtualEngine(num_cached=18), EVENLY, RunLimits(30)))
    assert "warm cache" in found_in(warm)
    assert "warm cache" not in found_in(warm, is_cache_wanted=True)
    assert "warm cache" not in found_in(run(measure(VirtualEngine(num_cached=0), EVENLY, RunLimits(30))))


def test_what_a_workload_shares_itself_is_no_warm_cache() -> None:
    """A warning for the chat template, which stands in every prompt, or for the shared prefix that was asked for."""
    window = run(measure(VirtualEngine(num_cached=5), EVENLY, RunLimits(30)))  # of 20
    assert "warm cache" in found_in(window)
    assert "warm cache" not in found_in(window, replace(WORK, calibration=TokenCalibration(1.0, 5.0, True)))
    assert "warm cache" in found_in(window, replace(WORK, calibration=TokenCalibration(1.0, 4.0, True)))
    assert "warm cache" not in found_in(window, replace(WORK, prefix=SharedPrefix(0.5, 10)))


def test_an_early_end_is_flagged() -> None:
    """A server that is fast since it says little."""
    window = run(measure(VirtualEngine(num_tokens=lambda request: 3), EVENLY, RunLimits(30)))
    assert summarise(window).num_short_answers == 30
    assert "ended early" in found_in(window)


def test_a_speed_that_memory_forbids_is_flagged() -> None:
    """500 tokens/s from a model whose weights can be read 50 times a second."""
    window = run(measure(VirtualEngine(first_s=0.5, gap_s=0.002), EVENLY, RunLimits(30)))
    assert "faster than memory" in found_in(window, one_stream_ceiling=50.0)
    assert "faster than memory" not in found_in(window, one_stream_ceiling=450.0)
    assert "faster than memory" not in found_in(window)


def test_a_generator_that_falls_behind_is_flagged() -> None:
    """A schedule that the client could not keep, reported as the server's latency."""
    late = replace(sample(1.0, 1.1, 1.2), started_s=0.5)
    assert "generator behind" in found_in(window_of(late))
    window = run(
        measure(VirtualEngine(first_s=0.5), OpenLoop(10, is_poisson=False), RunLimits(30, warmup=0, max_in_flight=1))
    )
    assert "generator behind" in found_in(window)


def test_growing_latency_is_flagged() -> None:
    """An open loop above capacity: its figures are those of the moment at which it was stopped."""
    window = run(measure(VirtualEngine(first_s=0.5, slots=1), OpenLoop(10, is_poisson=False), RunLimits(30, warmup=0)))
    assert {"not steady"} <= found_in(window)
    assert "not steady" not in found_in(run(measure(VirtualEngine(), EVENLY, RunLimits(30))))


def test_few_samples_are_flagged() -> None:
    """Percentiles of nine requests."""
    assert "few samples" in found_in(run(measure(VirtualEngine(), EVENLY, RunLimits(9))))


def test_prompts_of_another_length_than_asked_are_flagged() -> None:
    """ "2,000-token prompts" that have 300."""
    assert "lengths missed" in found_in(
        window_of(replace(sample(1.0, 1.1, 1.2), num_prompt_tokens=30)),
        Workload(Lengths("fixed", 10), Lengths("fixed", 3)),
    )


def test_all_figures_of_a_failing_run_exist() -> None:
    """A run in which nothing was answered ends in a traceback instead of a report."""
    window = run(measure(VirtualEngine(fate=lambda _: Failure.HTTP_503), EVENLY, RunLimits(10)))
    summary: LoadSummary = summarise(window, Slo.parse("ttft=1"))
    assert (summary.ttft_s, summary.num_ok, summary.failure_rate) == (None, 0, 1.0)
    assert "failures" in found_in(window)
    assert summary.e2e_with_failures_s is not None
    assert math.isinf(summary.e2e_with_failures_s.mean)
