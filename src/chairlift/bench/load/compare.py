"""`chairlift bench compare`: the same work in turns against several servers; ratios, and how far they scatter.

round 1   A B C        A machine drifts: it warms up, throttles or has a neighbour. The server that is always measured
round 2   B C A        first would win or lose by that, so each is first in turn. Ratios are taken within a round and
round 3   C A B        reported as median and range. They show a difference only if all rounds agree on its sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from chairlift.bench.client.target import ConnectOptions
from chairlift.bench.load.doubts import grouped
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.run import LoadCommand, LoadResult, PlannedRun
from chairlift.bench.load.summary import LoadSummary
from chairlift.bench.report.measure import machine_note
from chairlift.bench.report.report import Cell, Chart, Report, Series, Table, columns, number
from chairlift.bench.report.stats import Spread, median_of
from chairlift.errors import ConfigError

COMMAND = "bench compare"
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that is compared."""

    name: str
    unit: str
    of: Callable[[LoadSummary], float | None]
    is_better_low: bool = True


def _at(spread: Spread | None, percentile: str) -> float | None:
    return None if spread is None else float(getattr(spread, percentile))


METRICS = (
    Metric("TTFT p50", "s", lambda summary: _at(summary.ttft_s, "p50")),
    Metric("TTFT p95", "s", lambda summary: _at(summary.ttft_s, "p95")),
    Metric("ITL p50", "s", lambda summary: _at(summary.itl_s, "p50")),
    Metric("ITL p99", "s", lambda summary: _at(summary.itl_s, "p99")),
    Metric("TPOT p50", "s", lambda summary: _at(summary.tpot_s, "p50")),
    Metric("E2E p50", "s", lambda summary: _at(summary.e2e_s, "p50")),
    Metric("E2E p95", "s", lambda summary: _at(summary.e2e_s, "p95")),
    Metric("output", "tokens/s", lambda summary: summary.capacity.output_tokens_per_s, False),
    Metric("total", "tokens/s", lambda summary: summary.capacity.total_tokens_per_s, False),
)
Rounds = Sequence[LoadSummary | None]
"""One server's figures, round by round; None for a round that was not measured."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric of one server / that of the first server, round by round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return median(self.rounds)

    @property
    def is_told_apart(self) -> bool:
        """Whether all of at least LEAST_ROUNDS rounds agree on the sign, and the median exceeds their scatter."""
        low, high = math.log(min(self.rounds)), math.log(max(self.rounds))
        agree = low > 0 or high < 0
        return len(self.rounds) >= LEAST_ROUNDS and agree and abs(math.log(self.median)) > high - low

    def __str__(self) -> str:
        said = f"{number(self.median)} ({number(min(self.rounds))} to {number(max(self.rounds))})"
        return said if self.is_told_apart else said + " ~"


def ratio(metric: Metric, ours: Rounds, theirs: Rounds) -> Ratio | None:
    """Over the rounds in which both servers have the metric and it is not 0; None if there is none."""
    pairs = [
        (mine, other)
        for a, b in zip(ours, theirs, strict=False)
        if a is not None and b is not None
        if (mine := metric.of(a)) and (other := metric.of(b))
    ]
    return Ratio(tuple(mine / other for mine, other in pairs)) if pairs else None


def order(num_servers: int, turn: int) -> list[int]:
    """The order of the servers in a round: each is first in turn."""
    return [(turn + place) % num_servers for place in range(num_servers)]


def command(urls: Sequence[str], options: ConnectOptions, spec: RunSpec, num_rounds: int) -> LoadCommand:
    """Round by round, in fresh words each time. Raises ConfigError for one server."""
    if len(urls) < 2:
        raise ConfigError("compare needs two servers", hint="chairlift bench compare URL URL")
    turns = [(turn, at) for turn in range(num_rounds) for at in order(len(urls), turn)]
    plan = [PlannedRun(at, spec.fresh(), f"round {turn + 1} of {num_rounds}: {letter(at)}, ") for turn, at in turns]

    def tell(results: Sequence[LoadResult | None]) -> Report:
        by_turn = dict(zip(turns, results, strict=True))
        rounds = [[by_turn[turn, at] for at in range(len(urls))] for turn in range(num_rounds)]
        return report([row for row in rounds if any(row)], urls)

    return LoadCommand(urls, options, plan, tell)


def letter(at: int) -> str:
    """The name of a server in tables: A, B, C."""
    return chr(ord("A") + at) if at < 26 else f"S{at + 1}"


def report(rounds: Sequence[Sequence[LoadResult | None]], urls: Sequence[str]) -> Report:
    """The report of results by round and server; None for what was not measured."""
    by_server = [[row[at] for row in rounds] for at in range(len(urls))]
    known = [next(filter(None, column), None) for column in by_server]
    first = next(filter(None, known), None)
    if first is None:
        return Report(COMMAND, "nothing was measured")
    names: list[list[Cell]] = [[letter(at), each.target.name if each else urls[at]] for at, each in enumerate(known)]
    summaries = [[None if each is None else each.summary for each in column] for column in by_server]
    return Report(
        command=COMMAND,
        title=f"{len(urls)} servers in turns, {len(rounds)} rounds: {first.spec.arrivals}",
        tables=[Table("Who is who", columns("<", "<server"), names), _table(summaries), _failures(summaries)],
        verdict=_verdict(summaries),
        warnings=_warnings(by_server),
        notes=[*first.notes(), *dict.fromkeys(machine_note(url) for url in urls)],
        data=_data(by_server, summaries),
        charts=_charts(summaries),
    )


def _table(summaries: Sequence[Rounds]) -> Table:
    others = [head for at in range(1, len(summaries)) for head in (letter(at), f"{letter(at)} / A|median (range)")]
    rows: list[list[Cell]] = []
    for metric in METRICS:
        row: list[Cell] = [metric.name, metric.unit, _median(metric, summaries[0])]
        for column in summaries[1:]:
            compared = ratio(metric, column, summaries[0])
            row += [_median(metric, column), None if compared is None else str(compared)]
        rows.append(row)
    note = "Medians over the rounds; ratios within each round. ~: nobody is ahead, the rounds scatter too much."
    return Table("The same work in turns", columns("<", "<unit", "A", *others), rows, note)


def _median(metric: Metric, column: Rounds) -> float | None:
    return median_of(metric.of(summary) for summary in column if summary is not None)


def _failures(summaries: Sequence[Rounds]) -> Table:
    heads = ("<", "rounds", "requests", "failed", "prompt|tokens", "output|tokens", "cached", "stalled|streams")
    rows: list[list[Cell]] = []
    for at, column in enumerate(summaries):
        seen = [summary for summary in column if summary is not None]
        asked, failed = sum(each.num_requests for each in seen), sum(each.num_failed for each in seen)
        spreads = [[each.prompt_tokens for each in seen], [each.output_tokens for each in seen]]
        means = [median_of(each.mean for each in known if each) for known in spreads]
        lengths = [None if mean is None else round(mean, 1) for mean in means]
        hits = max((each.cache_hit_rate for each in seen if each.cache_hit_rate is not None), default=None)
        stalled = sum(each.stalls.num_streams_hit for each in seen)
        cached = None if hits is None else f"{hits:.1%}"
        rows.append([letter(at), len(seen), asked, failed, *lengths, cached, stalled])
    note = "Lengths by each server's own count: another tokenizer makes other tokens of the same text."
    return Table("What was asked and what came", columns(*heads), rows, note)


def _verdict(summaries: Sequence[Rounds]) -> list[str]:
    said = []
    for at, column in enumerate(summaries[1:], 1):
        found: dict[str, list[str]] = {"better in": [], "worse in": [], "not told apart in": []}
        for metric in METRICS:
            compared = ratio(metric, column, summaries[0])
            if compared is not None:
                found[_standing(metric, compared)].append(f"{metric.name} {number(compared.median)} x")
        parts = [f"{word} {', '.join(phrases)}" for word, phrases in found.items() if phrases]
        if parts:
            said.append(f"{letter(at)} against A: {'; '.join(parts)}.")
    return said


def _standing(metric: Metric, compared: Ratio) -> str:
    if not compared.is_told_apart:
        return "not told apart in"
    return "better in" if (compared.median < 1) == metric.is_better_low else "worse in"


def _warnings(by_server: Sequence[Sequence[LoadResult | None]]) -> list[str]:
    named = [
        (f"{letter(at)}{turn + 1}", each)
        for at, column in enumerate(by_server)
        for turn, each in enumerate(column)
        if each is not None
    ]
    found = grouped([(name, doubt) for name, each in named for doubt in each.doubts], "server and round")
    if len(by_server[0]) < LEAST_ROUNDS:
        found.append(f"few rounds: with fewer than {LEAST_ROUNDS} there is no telling a difference from noise")
    return found


def _data(by_server: Sequence[Sequence[LoadResult | None]], summaries: Sequence[Rounds]) -> dict[str, Any]:
    ratios = {}
    for at, column in enumerate(summaries[1:], 1):
        named = {f"{metric.name}, {metric.unit}": ratio(metric, column, summaries[0]) for metric in METRICS}
        ratios[f"{letter(at)}/A"] = {
            name: {"median": each.median, "rounds": list(each.rounds), "is_told_apart": each.is_told_apart}
            for name, each in named.items()
            if each is not None
        }
    servers = {
        letter(at): [None if each is None else each.as_dict() for each in column] for at, column in enumerate(by_server)
    }
    return {"ratios": ratios, "servers": servers}


def _charts(summaries: Sequence[Rounds]) -> list[Chart]:
    x = [letter(at) for at in range(len(summaries))]
    drawn = []
    for metric in METRICS:
        medians = [value for column in summaries if (value := _median(metric, column)) is not None]
        if len(medians) == len(x):
            title, y_label = f"{metric.name}, median of the rounds", f"{metric.name}, {metric.unit}"
            drawn.append(Chart("bars", title, "server", y_label, [Series(metric.name, x, medians)]))
    return drawn
