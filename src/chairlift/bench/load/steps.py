"""`chairlift bench steps`: the same work with more and more users, and the number beyond which more do not help."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.bench.client.target import ConnectOptions
from chairlift.bench.load.doubts import grouped
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.run import LoadCommand, LoadResult, PlannedRun
from chairlift.bench.report.measure import machine_note
from chairlift.bench.report.report import Cell, Chart, Report, Series, Table, columns, number
from chairlift.bench.report.stats import Spread
from chairlift.errors import ConfigError

COMMAND = "bench steps"
GAIN = 1.1
RULE = (
    f"The knee is the smallest number of users from which on no larger one brought {GAIN - 1:.0%} more output "
    "tokens/s: beyond it users only wait for each other."
)


def parse_users(text: str) -> list[int]:
    """`1,2,5,10,20`, ascending. Raises ConfigError."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--users: {text!r} is no list of numbers", hint="1,2,5,10,20")
    users = [int(part) for part in text.split(",")]
    if users != sorted(set(users)) or not 1 <= users[0] <= users[-1] <= 10_000:
        raise ConfigError(f"--users: {text!r} must ascend, from 1 to 10,000")
    return users


def knee(users: Sequence[int], tokens_per_s: Sequence[float]) -> int | None:
    """The knee by RULE; None if the last step still brought more, and for fewer than two steps."""
    for index, rate in enumerate(tokens_per_s[:-1]):
        if max(tokens_per_s[index + 1 :]) < GAIN * rate:
            return users[index]
    return None


def command(url: str, options: ConnectOptions, specs: Sequence[RunSpec]) -> LoadCommand:
    """One step after another."""
    plan = [PlannedRun(0, spec) for spec in specs]
    return LoadCommand([url], options, plan, lambda results: report(list(filter(None, results)), url))


def report(results: Sequence[LoadResult], url: str) -> Report:
    """The report of these steps. One that was interrupted has what it measured."""
    if not results:
        return Report(COMMAND, f"{url}: nothing was measured")
    users = [result.spec.max_in_flight for result in results]
    done = [result for result in results if not result.window.is_interrupted]
    found = knee(users, [result.summary.capacity.output_tokens_per_s for result in done])
    doubted = [(str(count), doubt) for count, each in zip(users, results, strict=True) for doubt in each.doubts]
    return Report(
        command=COMMAND,
        title=f"{results[0].target.name}: what changes with more people",
        tables=[_felt(users, results, found), _got(users, results, found)],
        verdict=_verdict(users, done, found),
        warnings=grouped(doubted, "users"),
        notes=[*results[-1].notes(), machine_note(url)],
        data={"knee_users": found, "knee_rule": RULE, "steps": [each.as_dict() for each in results]},
        charts=_charts(users, results, found),
    )


def _felt(users: Sequence[int], results: Sequence[LoadResult], found: int | None) -> Table:
    spreads = [f"{name} {which}|s" for name in ("TTFT", "ITL", "E2E") for which in ("p50", "p95")]
    heads = columns("users", "answers", "failed", *spreads, "queue mean|s", "stalled|streams", "<")
    rows: list[list[Cell]] = []
    for count, result in zip(users, results, strict=True):
        summary = result.summary
        row: list[Cell] = [count, summary.num_ok, summary.num_failed]
        for spread in (summary.ttft_s, summary.itl_s, summary.e2e_s):
            row += [_at(spread, 50), _at(spread, 95)]
        rows.append([*row, result.queue_s, summary.stalls.num_streams_hit, "<- knee" if count == found else ""])
    note = "'max' stands before a p95 that is the largest value, for want of values."
    return Table("What one of them feels", heads, rows, note)


def _at(spread: Spread | None, percent: int) -> Cell:
    """A percentile as a cell, marked if it is only the largest value."""
    if spread is None:
        return None
    value = spread.p50 if percent == 50 else spread.p95
    return f"max {number(value)}" if spread.is_max(percent) else value


def _got(users: Sequence[int], results: Sequence[LoadResult], found: int | None) -> Table:
    heads = columns(
        "users", "output|tokens/s", "ceiling|tokens/s", "prompt|tokens/s", "total|tokens/s", "one stream|tokens/s",
        "ceiling|tokens/s", "answers|1/s", "users/turn|1/s", "in flight", "<",
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for count, result in zip(users, results, strict=True):
        rates, little, ceiling = result.summary.capacity, result.summary.little, result.target.one_stream_ceiling
        expected = None if little is None else little.expected_requests_per_s
        row: list[Cell] = [count, rates.output_tokens_per_s, result.target.output_ceiling(rates.mean_in_flight)]
        row += [rates.prompt_tokens_per_s, rates.total_tokens_per_s, result.stream_rate, ceiling]
        row += [rates.requests_per_s, expected, rates.mean_in_flight, "<- knee" if count == found else ""]
        rows.append(row)
    note = (
        "Ceilings: what memory allows one stream, and that for each that runs. users/turn is users / (think + "
        f"latency), which answers/s must match. {RULE}"
    )
    return Table("What all of them get together", heads, rows, note)


def _verdict(users: Sequence[int], results: Sequence[LoadResult], found: int | None) -> list[str]:
    if len(results) < 2:
        return []
    first, last, most = results[0], results[-1], users[len(results) - 1]
    said = []
    before, after = first.summary.capacity.output_tokens_per_s, last.summary.capacity.output_tokens_per_s
    if before and after:
        together = f"{most} users get {number(after / before)} x the tokens/s that {users[0]} got, all together"
        one, many = first.stream_rate, last.stream_rate
        if one and many:
            together += f"; each of them reads {number(many)} tokens/s where each of {users[0]} read {number(one)}"
        said.append(f"{together}.")
    if found is not None:
        said.append(f"The knee is at {found} users.")
    else:
        said.append(f"No knee up to {most} users: the last step still brought {GAIN - 1:.0%} more or better.")
    return said


def _charts(users: Sequence[int], results: Sequence[LoadResult], found: int | None) -> list[Chart]:
    marks = [(float(found), "knee")] if found is not None else []
    x = [float(count) for count in users]
    summaries = [result.summary for result in results]
    output = Series("output", x, [summary.capacity.output_tokens_per_s for summary in summaries])
    total = Series("prompt and output", x, [summary.capacity.total_tokens_per_s for summary in summaries])
    drawn = [Chart("lines", "Throughput over users", "users", "tokens/s", [output, total], marks=marks)]
    for name, spreads in (("TTFT", [s.ttft_s for s in summaries]), ("ITL", [s.itl_s for s in summaries])):
        points = [(at, spread) for at, spread in zip(x, spreads, strict=True) if spread is not None]
        if points:
            where = [at for at, _ in points]
            lines = [Series(p, where, [getattr(spread, p) for _, spread in points]) for p in ("p50", "p95")]
            drawn.append(Chart("lines", f"{name} over users", "users", f"{name}, s", lines, marks=marks))
    return drawn
