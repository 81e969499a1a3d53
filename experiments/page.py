"""Measures the tables of docs/experiments.md and writes them there: `scripts/experiments [NAME ...]`.

The text of the page is written by hand. The tables between `<!-- NAME -->` and `<!-- /NAME -->` are written here. An
experiment is repeated in rounds, and a figure that differs between rounds is shown as a range.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.bench.local.batching import BatchingCommand, MixedLoad
from chairlift.bench.local.server import serving
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Cell, Column, Table, number
from chairlift.errors import ChairliftError
from experiments import scenarios
from experiments.server import Setup

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Experiment:
    """One section of the page."""

    name: str
    measure: Callable[[Setup], Coroutine[Any, Any, list[Table]]]
    is_repeated: bool = True  # a command that repeats its work itself is not repeated


async def _streaming(setup: Setup) -> list[Table]:
    count = str(setup.tokens(20))
    return await _command(setup, "stream", "--requests", count, "--tokens", str(setup.tokens(256)))


async def _users(setup: Setup) -> list[Table]:
    lengths = ("--prompt-tokens", str(setup.tokens(200)), "--output-tokens", str(setup.tokens(96)))
    return await _command(setup, "steps", "--users", "1,2,5,20", *lengths)


async def _command(setup: Setup, name: str, *words: str) -> list[Table]:
    """The tables of `chairlift bench NAME` against a server with default settings."""
    setup.say(f"chairlift bench {name} {' '.join(words)}")
    async with serving(setup.model) as server:
        document = await scenarios.run_chairlift("bench", name, server.url, *words)
    return tables(document)


async def _batching(setup: Setup) -> list[Table]:
    setup.say("chairlift bench batching")
    run = BatchingCommand(setup.model, MixedLoad(setup.tokens(1200), setup.tokens(24)), (1, 2, 4, 8))
    with ProgressDisplay() as progress:
        await run.work(progress)
    return list(run.report().tables)


EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment("streaming", _streaming, is_repeated=False),
        Experiment("users", _users, is_repeated=False),
        Experiment("batching", _batching, is_repeated=False),
        Experiment("gap", scenarios.gap),
        Experiment("chunks", scenarios.chunks),
        Experiment("prefix", scenarios.prefix),
        Experiment("threads", scenarios.threads),
        Experiment("preemption", scenarios.preemption),
        Experiment("kv", scenarios.kv),
        Experiment("queue", scenarios.queue),
        Experiment("slots", scenarios.slots),
        Experiment("startup", scenarios.startup),
    )
}
"""In the order of the page."""


def tables(document: dict[str, Any]) -> list[Table]:
    """The tables of a report's JSON."""
    return [
        Table(
            table["title"],
            [Column(**column) for column in table["columns"]],
            table["rows"],
            table["note"],
        )
        for table in document["tables"]
    ]


def merged(rounds: Sequence[Sequence[Table]]) -> list[Table]:
    """The tables of several rounds as one. A cell that differs becomes a range, "1.2 to 1.4"."""
    whole = []
    for same in zip(*rounds, strict=True):
        rows = [
            [_range(cells) for cells in zip(*row, strict=True)]
            for row in zip(*(table.rows for table in same), strict=True)
        ]
        whole.append(Table(same[0].title, same[0].columns, rows, same[0].note))
    return whole


def _range(cells: Sequence[Cell]) -> str:
    known = [cell for cell in cells if cell is not None]
    if not known:
        return number(None)
    ordered = sorted(known, key=lambda cell: (isinstance(cell, str), cell))
    low, high = number(ordered[0]), number(ordered[-1])
    return low if low == high else f"{low} to {high}"


def markdown(table: Table) -> str:
    """A table of the page, with its title and note."""
    heads = [f"{column.title}{f', {column.unit}' if column.unit else ''}" for column in table.columns]
    rules = ["---" if column.align == "left" else "---:" for column in table.columns]
    lines = [heads, rules, *([number(cell) for cell in row] for row in table.rows)]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return "\n\n".join(filter(None, (f"*{table.title}*" if table.title else "", body, table.note)))


def written(page: str, name: str, block: str) -> str:
    """The page with a new block between the experiment's markers. Raises ChairliftError if they are missing."""
    found = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda match: f"{match[1]}\n{block}\n\n{match[2]}",
        page,
        flags=re.S,
    )
    if found[1] != 1:
        raise ChairliftError(f"the page has no place for {name!r}", hint=f"<!-- {name} --> and <!-- /{name} -->")
    return found[0]


async def measured(experiment: Experiment, setup: Setup, rounds: int) -> str:
    """Runs an experiment; its block of the page."""
    load, begin_s = os.getloadavg()[0], time.monotonic()
    times = rounds if experiment.is_repeated else 1
    taken = [await experiment.measure(setup) for _ in range(times)]
    said = f"{datetime.now(UTC):%Y-%m-%d}"
    said += f", {times} rounds" if times > 1 else ""
    said += f", load average {load:.1f} before"
    setup.say(f"{experiment.name}: {time.monotonic() - begin_s:.0f} s")
    return "\n\n".join([*map(markdown, merged(taken)), f"<sub>{said}</sub>"])


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(EXPERIMENTS)}; all if none is given.")
    ] = None,
    docs: Annotated[Path, typer.Option(help="The page to write into.")] = Path("docs/experiments.md"),
    model: Annotated[str | None, typer.Option(help="As for `chairlift serve`.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that an experiment is repeated.")] = ROUNDS,
    scale: Annotated[float, typer.Option(min=0.001, max=1, help="Part of the tokens, to try the machinery.")] = 1.0,
) -> None:
    """Measure the experiments of the documentation again, and write their tables into it."""
    for name in names or ():
        if name not in EXPERIMENTS:
            raise ChairliftError(f"there is no experiment {name!r}", hint=f"there are {', '.join(EXPERIMENTS)}")
    setup = Setup(model, scale, str(docs.parent / "tour.md"), lambda line: print(line, file=sys.stderr, flush=True))
    for name in names or EXPERIMENTS:
        block = asyncio.run(measured(EXPERIMENTS[name], setup, rounds))
        docs.write_text(written(docs.read_text(encoding="utf-8"), name, block), encoding="utf-8")
        print(f"## {name}\n\n{block}\n", flush=True)
