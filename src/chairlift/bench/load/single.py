"""`chairlift bench load`: one server under one load. Every figure stands beside the number of values behind it."""

from __future__ import annotations

import math

from chairlift.bench.client.engine_metrics import Histogram
from chairlift.bench.client.target import ConnectOptions
from chairlift.bench.load.arrivals import ClosedLoop, OpenLoop
from chairlift.bench.load.generator import Attempt
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.run import LoadCommand, LoadResult, PlannedRun
from chairlift.bench.report.measure import machine_note
from chairlift.bench.report.report import Cell, Chart, Lane, Report, Series, Span, Table, columns, number
from chairlift.bench.report.stats import Spread

COMMAND = "bench load"
ABOVE_CAPACITY = 0.8
"""Share of the requests that fell due. Fewer answers mean overload, unless chance (twice the root) explains them."""


def command(url: str, options: ConnectOptions, spec: RunSpec) -> LoadCommand:
    """One run."""
    return LoadCommand([url], options, [PlannedRun(0, spec)], lambda results: report(results[0], url))


def report(result: LoadResult | None, url: str) -> Report:
    """The report of a run; None if nothing was measured."""
    if result is None:
        return Report(COMMAND, f"{url}: nothing was measured")
    return Report(
        command=COMMAND,
        title=f"{result.target.name}: {result.spec.arrivals}",
        tables=[latencies(result), capacity(result), facts(result)],
        verdict=verdict(result),
        warnings=[str(doubt) for doubt in result.doubts],
        notes=[*result.notes(), machine_note(url)],
        data=result.as_dict(),
        charts=charts(result),
    )


def latencies(result: LoadResult) -> Table:
    """The latencies of the measured requests."""
    summary = result.summary
    spreads = {
        "TTFT": summary.ttft_s,
        "first visible output": summary.visible_s,
        "ITL": summary.itl_s,
        "TPOT": summary.tpot_s,
        "E2E": summary.e2e_s,
    }
    if summary.num_failed:
        spreads["E2E, a failure as never"] = summary.e2e_with_failures_s
    spreads["dispatch delay (client)"] = summary.dispatch_s
    rows = [*(_spread_row(name, spread) for name, spread in spreads.items()), _queue_row(result.queue)]
    heads = columns("<", "values", "mean|s", "p50|s", "p95|s", "p99|s", "max|s")
    title = f"What each request felt ({summary.num_ok} answered of {summary.num_requests})"
    return Table(title, heads, rows, _latency_note(result))


def _spread_row(name: str, spread: Spread | None) -> list[Cell]:
    if spread is None:
        return [name, 0, None, None, None, None, None]
    p95 = "= max" if spread.is_max(95) else _figure(spread.p95)
    p99 = "= max" if spread.is_max(99) else _figure(spread.p99)
    return [name, spread.num, _figure(spread.mean), _figure(spread.p50), p95, p99, _figure(spread.max)]


def _queue_row(queue: Histogram | None) -> list[Cell]:
    """The engine counts its waits by bucket: each figure but the mean is the bound of a bucket."""
    name = "queue (engine, in the window)"
    if queue is None:
        return [name, *[None] * 6]
    row: list[Cell] = [name, queue.num, queue.mean_s]
    for bound_s in (queue.bound_s(percent) for percent in (50, 95, 99, 100)):
        row.append("beyond its buckets" if bound_s == math.inf else bound_s and f"<= {number(bound_s)}")
    return row


def _figure(value: float) -> Cell:
    return value if math.isfinite(value) else "never"


def _latency_note(result: LoadResult) -> str:
    summary = result.summary
    is_closed = isinstance(result.spec.arrivals, ClosedLoop)
    origin = "the end of the user's thinking" if is_closed else "the scheduled moment"
    said = [
        f"From {origin} on; percentiles are observed values (nearest rank), '= max' where there are too few of them."
    ]
    if not summary.is_streamed:
        said.append("TTFT, ITL and TPOT are not measurable without streaming.")
    if result.queue_s is None:
        said.append("The engine's queue wait is not exported.")
    else:
        said.append("The engine counts its queue waits by bucket: '<=' stands before the bound that they kept.")
    return " ".join(said)


def capacity(result: LoadResult) -> Table:
    """What the server did for all requests together, beside what it could do at most."""
    ceiling, rates = result.target.one_stream_ceiling, result.summary.capacity
    arrivals, little = result.spec.arrivals, result.summary.little
    expected = None if little is None else little.expected_requests_per_s
    asked = (expected, "users / (think + latency)")
    if isinstance(arrivals, OpenLoop):
        asked = (arrivals.rate or None, "asked for")
    together = result.target.output_ceiling(rates.mean_in_flight)
    limit = "users" if isinstance(arrivals, ClosedLoop) else "--max-in-flight"
    rows: list[list[Cell]] = [
        ["output tokens/s", rates.output_tokens_per_s, together, "running x one stream's"],
        ["prompt tokens/s", rates.prompt_tokens_per_s, None, ""],
        ["total tokens/s", rates.total_tokens_per_s, None, ""],
        ["answers/s", rates.requests_per_s, *asked],
        ["in flight, mean", rates.mean_in_flight, result.spec.max_in_flight, limit],
        ["one stream's tokens/s, median", result.stream_rate, ceiling, "memory bandwidth / bytes read for a token"],
    ]
    heads = columns("<", "measured", "ceiling", "<which is")
    note = "Capacity is what all requests got together; one user feels the last line."
    if ceiling is None:
        note += " The server does not tell its memory bandwidth, so there is no ceiling for its streams."
    return Table("Capacity", heads, [[*row[:3], row[3] if row[2] is not None else ""] for row in rows], note)


def facts(result: LoadResult) -> Table:
    """What was asked for, and what became of it."""
    summary, workload = result.summary, result.spec.workload
    engine, stalls = result.engine, summary.stalls
    preemptions = None if engine is None else engine.num_preemptions
    failed: list[list[Cell]] = [[f"failed: {cause}", count, ""] for cause, count in summary.failures.items()]
    rows: list[list[Cell]] = [
        ["answered", summary.num_ok, f"of {summary.num_requests} measured"],
        *failed,
        ["refused (503)", summary.num_503, ""],
        ["prompt tokens, mean", _mean(summary.prompt_tokens), _asked(summary.prompt_asked)],
        ["output tokens, mean", _mean(summary.output_tokens), _asked(summary.output_asked)],
        ["answers shorter than asked", summary.num_short_answers, f"of {summary.num_ok}"],
        [
            "prompt tokens from the prefix cache",
            _percent(summary.cache_hit_rate),
            f"up to {workload.shared_share:.1%} is the workload's own (template, shared prefix)",
        ],
        ["stalls", stalls.num, f"in {stalls.num_streams_hit} of {stalls.num_streams} streams"],
        ["longest stall, s", stalls.longest_s or None, "a gap over 1 s and over 4 x its stream's median"],
        ["preemptions", preemptions, "not exported" if preemptions is None else ""],
    ]
    if summary.goodput is not None:
        share = _percent(summary.goodput.share)
        rows.append(
            [f"goodput: {summary.goodput.slo_s}", share, f"{number(summary.goodput.requests_per_s)} requests/s"]
        )
    return Table("What was asked and what came", columns("<", "", "<"), rows)


def _mean(spread: Spread | None) -> Cell:
    return None if spread is None else round(spread.mean, 1)


def _asked(spread: Spread | None) -> str:
    return "" if spread is None else f"asked: {spread.mean:.1f}"


def _percent(share: float | None) -> Cell:
    return None if share is None else f"{share:.1%}"


def verdict(result: LoadResult) -> list[str]:
    """What the figures mean, in sentences."""
    summary, capacity = result.summary, result.summary.capacity
    if not summary.num_requests:
        return ["Nothing was measured: no request that counts has ended."]
    if not summary.num_ok or summary.e2e_s is None:
        return ["Nothing was answered: there are no latencies."]
    said = []
    if summary.visible_s is not None:
        said.append(
            f"Half of the answers began within {number(summary.visible_s.p50)} s, the slowest after "
            f"{number(summary.visible_s.max)} s; half were complete within {number(summary.e2e_s.p50)} s."
        )
    if summary.num_ok < summary.num_requests:
        missed = summary.num_failed
        said.append(f"{missed} of {summary.num_requests} people got no answer, and no percentile above speaks of them.")
    if _is_too_much(result):
        said.append(
            f"{number(capacity.requests_per_s)} of {number(capacity.due_per_s)} requests/s were answered: this is more "
            "than it can do, and the wait grows with every minute."
        )
    if summary.stalls.num:
        said.append(
            f"{summary.stalls.num_streams_hit} of {summary.stalls.num_streams} streams stalled, the longest for "
            f"{number(summary.stalls.longest_s)} s: their readers think that it hangs."
        )
    if summary.goodput is not None:
        said.append(f"{summary.goodput.share:.0%} of the requests kept {summary.goodput.slo_s}.")
    return said


def _is_too_much(result: LoadResult) -> bool:
    if not isinstance(result.spec.arrivals, OpenLoop) or result.spec.workload.trace:
        return False  # a trace's window is open until all have ended
    rates, seconds = result.summary.capacity, result.window.seconds
    num_due, num_left = rates.due_per_s * seconds, (rates.due_per_s - rates.requests_per_s) * seconds
    return num_left > max((1 - ABOVE_CAPACITY) * num_due, 2 * math.sqrt(num_due))


def charts(result: LoadResult) -> list[Chart]:
    """The distributions, and the measured requests over time."""
    good = [attempt.sample for attempt in result.window.measured if attempt.sample.is_ok]
    ttft = [value for sample in good if (value := sample.first_token_s) is not None]
    gaps = [gap for sample in good for gap in sample.itl_s]
    drawn = []
    if ttft:
        drawn.append(Chart("cdf", "TTFT", "TTFT, s", "answers, %", [Series("TTFT", ttft)]))
    if gaps:
        drawn.append(Chart("cdf", "ITL", "ITL, s", "gaps, %", [Series("ITL", gaps)], log_x=min(gaps) > 0))
    lanes = [_lane(attempt, result.window.begin_s) for attempt in result.window.measured]
    if lanes:
        drawn.append(Chart("timeline", "The measured requests", "s from the window's begin", "request", lanes=lanes))
    return drawn


def _lane(attempt: Attempt, begin_s: float) -> Lane:
    """From outside, waiting for a slot cannot be told from prefill."""
    sample = attempt.sample
    first = sample.token_times[0] if sample.token_times else sample.ended_s
    spans = [
        Span("queued", sample.scheduled_s - begin_s, sample.started_s - begin_s),
        Span("prefill", sample.started_s - begin_s, first - begin_s),
        Span("decode" if sample.is_ok else "failed", first - begin_s, sample.ended_s - begin_s),
    ]
    return Lane(str(attempt.request.index), [span for span in spans if span.end_s > span.start_s])
