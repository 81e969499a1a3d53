"""`chairlift bench compare`: the same work in turns against several servers; ratios, and how far they scatter.

round 1   A B C        A machine that warms up, throttles or has a neighbour drifts: whoever is always measured
round 2   B C A        first would win or lose by that. Ratios are taken within a round and told as median and
round 3   C A B        range; a difference is one only if all rounds agree about its sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from chairlift.bench import figures
from chairlift.bench.checks import grouped
from chairlift.bench.live import Live, Shared, machine_note, measure
from chairlift.bench.options import Wanted
from chairlift.bench.report import Cell, Chart, Column, Report, Series, Table, number
from chairlift.bench.stats import Spread, Summary
from chairlift.bench.trial import Outcome, Trial, meet

COMMAND = "bench compare"
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is compared."""

    name: str
    unit: str
    of: Callable[[Summary], float | None]
    is_better_low: bool = True


def _p50(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p50


FIGURES = (
    Figure("TTFT p50", "s", lambda summary: _p50(summary.ttft)),
    Figure("TTFT p95", "s", lambda summary: None if summary.ttft is None else summary.ttft.p95),
    Figure("ITL p50", "s", lambda summary: _p50(summary.itl)),
    Figure("ITL p99", "s", lambda summary: None if summary.itl is None else summary.itl.p99),
    Figure("TPOT p50", "s", lambda summary: _p50(summary.tpot)),
    Figure("E2E p50", "s", lambda summary: _p50(summary.e2e)),
    Figure("E2E p95", "s", lambda summary: None if summary.e2e is None else summary.e2e.p95),
    Figure("output", "tokens/s", lambda summary: summary.rates.output_tokens, False),
    Figure("total", "tokens/s", lambda summary: summary.rates.total_tokens, False),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of a server / the same of the first server, round by round."""

    rounds: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.rounds)

    @property
    def is_told_apart(self) -> bool:
        """By the rule above."""
        low, high = math.log(min(self.rounds)), math.log(max(self.rounds))
        agree = low > 0 or high < 0
        return len(self.rounds) >= LEAST_ROUNDS and agree and abs(math.log(self.middle)) > high - low

    def __str__(self) -> str:
        said = f"{number(self.middle)} ({number(min(self.rounds))} to {number(max(self.rounds))})"
        return said if self.is_told_apart else said + " ~"


def ratio(figure: Figure, ours: Sequence[Summary | None], theirs: Sequence[Summary | None]) -> Ratio | None:
    """Of the rounds in which both have the figure; None without one. Zeros have no ratio."""
    pairs = [
        (mine, other)
        for a, b in zip(ours, theirs, strict=False)
        if a is not None and b is not None
        if (mine := figure.of(a)) and (other := figure.of(b))
    ]
    return Ratio(tuple(mine / other for mine, other in pairs)) if pairs else None


def order(num_servers: int, turn: int) -> list[int]:
    """Who is measured when in a round: each is first in turn."""
    return [(turn + place) % num_servers for place in range(num_servers)]


Turns = list[list[Trial | None]]
"""By round and server."""


def compare(shared: Shared, wanted: Wanted, urls: Sequence[str], rounds: int) -> None:
    """Measures and tells."""
    turns: Turns = []

    async def work(progress: Live) -> None:
        async with AsyncExitStack() as stack:
            subjects = [await stack.enter_async_context(meet(shared, url)) for url in urls]
            for turn in range(rounds):
                turns.append([None] * len(urls))
                for at in order(len(urls), turn):
                    progress.say(f"round {turn + 1} of {rounds}: {letter(at)}, {subjects[at].name}")
                    trial = Trial(subjects[at], wanted.fresh(), progress, f"round {turn + 1}, {letter(at)}: ")
                    turns[-1][at] = trial
                    await trial.run()

    measure(shared.output, work, lambda: report(turns, urls))


def letter(at: int) -> str:
    """A, B, C: how a server is called in tables."""
    return chr(ord("A") + at) if at < 26 else f"S{at + 1}"


def report(turns: Turns, urls: Sequence[str]) -> Report:
    """Of the rounds that there are."""
    outcomes = [[trial.outcome if trial else None for trial in row] for row in turns]
    by_server = [[row[at] for row in outcomes] for at in range(len(urls))]
    known = [next((each for each in column if each is not None), None) for column in by_server]
    first = next((each for each in known if each is not None), None)
    if first is None:
        return Report(COMMAND, "nothing was measured")
    summaries = [[None if each is None else each.summary for each in column] for column in by_server]
    return Report(
        command=COMMAND,
        title=f"{len(urls)} servers in turns, {len(turns)} rounds: {first.wanted.arrivals}",
        tables=[_servers(urls, known), _table(summaries), _failures(summaries)],
        verdict=_verdict(summaries),
        warnings=_warnings(by_server),
        notes=[*figures.notes(first), *dict.fromkeys(machine_note(url) for url in urls)],
        data=_data(by_server, summaries),
        charts=_charts(summaries),
    )


def _servers(urls: Sequence[str], known: Sequence[Outcome | None]) -> Table:
    rows: list[list[Cell]] = [
        [letter(at), url] if each is None else [letter(at), each.subject.name]
        for at, (url, each) in enumerate(zip(urls, known, strict=True))
    ]
    return Table("Who is who", [Column("", align="left"), Column("server", align="left")], rows)


def _table(summaries: Sequence[Sequence[Summary | None]]) -> Table:
    columns = [Column("", align="left"), Column("unit", align="left"), Column("A")]
    for at in range(1, len(summaries)):
        columns += [Column(letter(at)), Column(f"{letter(at)} / A", "median (range)")]
    rows: list[list[Cell]] = []
    for figure in FIGURES:
        row: list[Cell] = [figure.name, figure.unit, _middle(figure, summaries[0])]
        for column in summaries[1:]:
            compared = ratio(figure, column, summaries[0])
            row += [_middle(figure, column), None if compared is None else str(compared)]
        rows.append(row)
    note = "Medians over the rounds; ratios within each round. ~: nobody is ahead, the rounds scatter too much."
    return Table("The same work in turns", columns, rows, note)


def _middle(figure: Figure, column: Sequence[Summary | None]) -> float | None:
    values = [value for summary in column if summary is not None and (value := figure.of(summary)) is not None]
    return median(values) if values else None


def _failures(summaries: Sequence[Sequence[Summary | None]]) -> Table:
    columns = [Column("", align="left"), Column("rounds"), Column("requests"), Column("failed")]
    columns += [Column("prompt", "tokens"), Column("output", "tokens"), Column("cached"), Column("stalled", "streams")]
    rows: list[list[Cell]] = []
    for at, column in enumerate(summaries):
        seen = [summary for summary in column if summary is not None]
        asked, good = sum(each.num_requests for each in seen), sum(each.num_ok for each in seen)
        lengths = [[each.mean for each in spreads if each] for spreads in _lengths(seen)]
        hits = [each.cache_hit_rate for each in seen if each.cache_hit_rate is not None]
        stalled = sum(each.stalls.num_streams_hit for each in seen)
        means = [round(median(values), 1) if values else None for values in lengths]
        rows.append([letter(at), len(seen), asked, asked - good, *means, f"{max(hits):.1%}" if hits else None, stalled])
    note = "Lengths by each server's own count: another tokenizer makes other tokens of the same text."
    return Table("What was asked and what came", columns, rows, note)


def _lengths(seen: Sequence[Summary]) -> tuple[list[Spread | None], list[Spread | None]]:
    return [each.prompt_tokens for each in seen], [each.output_tokens for each in seen]


def _verdict(summaries: Sequence[Sequence[Summary | None]]) -> list[str]:
    said = []
    for at, column in enumerate(summaries[1:], 1):
        found: dict[str, list[str]] = {"better in": [], "worse in": [], "not told apart in": []}
        for figure in FIGURES:
            compared = ratio(figure, column, summaries[0])
            if compared is not None:
                found[_standing(figure, compared)].append(f"{figure.name} {number(compared.middle)} x")
        parts = [f"{word} {', '.join(phrases)}" for word, phrases in found.items() if phrases]
        if parts:
            said.append(f"{letter(at)} against A: {'; '.join(parts)}.")
    return said


def _standing(figure: Figure, compared: Ratio) -> str:
    if not compared.is_told_apart:
        return "not told apart in"
    return "better in" if (compared.middle < 1) == figure.is_better_low else "worse in"


def _warnings(by_server: Sequence[Sequence[Outcome | None]]) -> list[str]:
    found = grouped(
        [
            (f"{letter(at)}{turn + 1}", doubt)
            for at, column in enumerate(by_server)
            for turn, each in enumerate(column)
            if each is not None
            for doubt in each.doubts
        ],
        "server and round",
    )
    if len(by_server[0]) < LEAST_ROUNDS:
        found.append(f"few rounds: with fewer than {LEAST_ROUNDS} there is no telling a difference from noise")
    return found


def _data(
    by_server: Sequence[Sequence[Outcome | None]], summaries: Sequence[Sequence[Summary | None]]
) -> dict[str, Any]:
    ratios = {}
    for at, column in enumerate(summaries[1:], 1):
        named = {f"{figure.name}, {figure.unit}": ratio(figure, column, summaries[0]) for figure in FIGURES}
        ratios[f"{letter(at)}/A"] = {
            name: {"median": each.middle, "rounds": list(each.rounds), "is_told_apart": each.is_told_apart}
            for name, each in named.items()
            if each is not None
        }
    servers = {
        letter(at): [None if each is None else each.as_dict() for each in column] for at, column in enumerate(by_server)
    }
    return {"ratios": ratios, "servers": servers}


def _charts(summaries: Sequence[Sequence[Summary | None]]) -> list[Chart]:
    drawn = []
    for figure in FIGURES:
        x = [letter(at) for at in range(len(summaries))]
        middles = [_middle(figure, column) for column in summaries]
        if all(value is not None for value in middles):
            bars = Series(figure.name, x, [value for value in middles if value is not None])
            drawn.append(
                Chart("bars", f"{figure.name}, median of the rounds", "server", f"{figure.name}, {figure.unit}", [bars])
            )
    return drawn
