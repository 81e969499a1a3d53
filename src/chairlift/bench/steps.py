"""`chairlift bench steps`: the same work with more and more users, and where more of them stop helping."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.bench import figures
from chairlift.bench.checks import grouped
from chairlift.bench.live import Live, Shared, machine_note, measure
from chairlift.bench.options import Wanted
from chairlift.bench.report import Cell, Chart, Column, Report, Series, Table, number
from chairlift.bench.stats import Spread
from chairlift.bench.trial import Outcome, Trial, meet
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
    """By RULE; None while the last step still brought more, and for fewer than two steps."""
    for index, rate in enumerate(tokens_per_s[:-1]):
        if max(tokens_per_s[index + 1 :]) < GAIN * rate:
            return users[index]
    return None


def steps(shared: Shared, wanted: Sequence[Wanted], url: str) -> None:
    """Measures one step after another and tells."""
    trials: list[Trial] = []

    async def work(progress: Live) -> None:
        async with meet(shared, url) as subject:
            for step in wanted:
                progress.say(f"{subject.name}: {step.arrivals}")
                trials.append(Trial(subject, step, progress, f"{step.arrivals}: "))
                await trials[-1].run()

    measure(shared.output, work, lambda: report([outcome for each in trials if (outcome := each.outcome)], url))


def report(outcomes: Sequence[Outcome], url: str) -> Report:
    """Of the steps that there are; one that was interrupted has what it measured."""
    if not outcomes:
        return Report(COMMAND, f"{url}: nothing was measured")
    users = [figures.bound(outcome) for outcome in outcomes]
    done = [outcome for outcome in outcomes if not outcome.window.is_interrupted]
    found = knee(users, [outcome.summary.rates.output_tokens for outcome in done])
    doubted = [(str(count), doubt) for count, each in zip(users, outcomes, strict=True) for doubt in each.doubts]
    return Report(
        command=COMMAND,
        title=f"{outcomes[0].subject.name}: what changes with more people",
        tables=[_felt(users, outcomes, found), _got(users, outcomes, found)],
        verdict=_verdict(users, done, found),
        warnings=grouped(doubted, "users"),
        notes=[*figures.notes(outcomes[-1]), machine_note(url)],
        data={"knee_users": found, "knee_rule": RULE, "steps": [each.as_dict() for each in outcomes]},
        charts=_charts(users, outcomes, found),
    )


def _felt(users: Sequence[int], outcomes: Sequence[Outcome], found: int | None) -> Table:
    columns = [Column("users"), Column("answers"), Column("failed")]
    columns += [Column(f"{name} {which}", "s") for name in ("TTFT", "ITL", "E2E") for which in ("p50", "p95")]
    columns += [Column("queue mean", "s"), Column("stalled", "streams"), Column("", align="left")]
    rows: list[list[Cell]] = []
    for count, outcome in zip(users, outcomes, strict=True):
        summary = outcome.summary
        row: list[Cell] = [count, summary.num_ok, summary.num_requests - summary.num_ok]
        for spread in (summary.ttft, summary.itl, summary.e2e):
            row += [_at(spread, 50), _at(spread, 95)]
        rows.append([*row, outcome.queue_s, summary.stalls.num_streams_hit, _mark(count, found)])
    note = "'max' stands before a p95 that is the largest value, for want of values."
    return Table("What one of them feels", columns, rows, note)


def _at(spread: Spread | None, percent: int) -> Cell:
    if spread is None:
        return None
    value = spread.p50 if percent == 50 else spread.p95
    return f"max {number(value)}" if spread.is_max(percent) else value


def _mark(users: int, found: int | None) -> str:
    return "<- knee" if users == found else ""


def _got(users: Sequence[int], outcomes: Sequence[Outcome], found: int | None) -> Table:
    columns = [Column("users"), Column("output", "tokens/s"), Column("ceiling", "tokens/s")]
    columns += [Column("prompt", "tokens/s"), Column("total", "tokens/s"), Column("one stream", "tokens/s")]
    columns += [Column("ceiling", "tokens/s"), Column("answers", "1/s"), Column("users/turn", "1/s")]
    columns += [Column("in flight"), Column("", align="left")]
    rows: list[list[Cell]] = []
    for count, outcome in zip(users, outcomes, strict=True):
        rates, little, ceiling = outcome.summary.rates, outcome.summary.little, outcome.subject.ceiling
        row: list[Cell] = [
            count,
            rates.output_tokens,
            outcome.subject.output_ceiling(rates.in_flight),
            rates.prompt_tokens,
        ]
        row += [rates.total_tokens, figures.stream_rate(outcome), ceiling, rates.requests]
        rows.append([*row, None if little is None else little.expected_per_s, rates.in_flight, _mark(count, found)])
    note = (
        "Ceilings: what memory allows one stream, and that for each that runs. users/turn is users / (think + "
        f"latency), which answers/s must match. {RULE}"
    )
    return Table("What all of them get together", columns, rows, note)


def _verdict(users: Sequence[int], outcomes: Sequence[Outcome], found: int | None) -> list[str]:
    if len(outcomes) < 2:
        return []
    first, last, most = outcomes[0], outcomes[-1], users[len(outcomes) - 1]
    said = []
    before, after = first.summary.rates.output_tokens, last.summary.rates.output_tokens
    if before and after:
        said.append(
            f"{most} users get {number(after / before)} x the tokens/s that {users[0]} got, all together"
            + _share(first, last, users)
        )
    if found is not None:
        said.append(f"The knee is at {found} users.")
    else:
        said.append(f"No knee up to {most} users: the last step still brought {GAIN - 1:.0%} more or better.")
    return said


def _share(first: Outcome, last: Outcome, users: Sequence[int]) -> str:
    one, many = figures.stream_rate(first), figures.stream_rate(last)
    if not one or not many:
        return "."
    return f"; each of them reads {number(many)} tokens/s where each of {users[0]} read {number(one)}."


def _charts(users: Sequence[int], outcomes: Sequence[Outcome], found: int | None) -> list[Chart]:
    marks = [(float(found), "knee")] if found is not None else []
    x = [float(count) for count in users]
    summaries = [outcome.summary for outcome in outcomes]
    output = Series("output", x, [summary.rates.output_tokens for summary in summaries])
    total = Series("prompt and output", x, [summary.rates.total_tokens for summary in summaries])
    drawn = [Chart("lines", "Throughput over users", "users", "tokens/s", [output, total], marks=marks)]
    for name, spreads in (("TTFT", [s.ttft for s in summaries]), ("ITL", [s.itl for s in summaries])):
        points = [(at, spread) for at, spread in zip(x, spreads, strict=True) if spread is not None]
        if points:
            where = [at for at, _ in points]
            lines = [
                Series("p50", where, [spread.p50 for _, spread in points]),
                Series("p95", where, [spread.p95 for _, spread in points]),
            ]
            drawn.append(Chart("lines", f"{name} over users", "users", f"{name}, s", lines, marks=marks))
    return drawn
