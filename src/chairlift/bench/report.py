"""What a measurement has to say, as plain data, and how it is told: tables, warnings, and one JSON document.

    command ── Report ──┬── stdout   title, tables, verdict, warnings, notes
                        ├── --json   the document
                        ├── --html   one file with the pictures (html.py)
                        └── stdout   the document again, as the last line, whatever became of the rest

Knows neither servers nor samples. Progress belongs to stderr (live.py), so that a pipe carries results only.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from chairlift import __version__
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | int | float | None
"""What stands in a table; None, NaN and infinity are shown as a dash and are null in JSON."""

_PIPE_WIDTH = 160
"""Columns for a table that goes into a file: nothing there is narrow."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head; its unit stands under the title and belongs to every number below."""

    title: str
    unit: str = ""
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of as many cells as there are columns. The note says what must be known to read it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. A cdf takes raw values in `x` and works out its own `y`; bars may have words in `x`."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a timeline's row, in seconds from the start of the run."""

    kind: Literal["queued", "prefill", "decode", "held", "failed"]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One request in a timeline."""

    label: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture as data. Axis labels carry their units, as in "TTFT, s"."""

    kind: Literal["cdf", "timeline", "lines", "bars"]
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series] = ()
    lanes: Sequence[Lane] = ()  # of a timeline, which has no series
    log_x: bool = False
    marks: Sequence[tuple[float, str]] = ()  # vertical lines, such as the knee: where, and what it says


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one command. `data` is for programs: plain JSON values, times in seconds, sizes in bytes."""

    command: str  # "bench load"
    title: str
    tables: Sequence[Table] = ()
    verdict: Sequence[str] = ()  # plain sentences: what the figures mean
    warnings: Sequence[str] = ()  # what makes them doubtful
    notes: Sequence[str] = ()  # machine, noise, what was asked for
    data: Mapping[str, Any] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    interrupted: bool = False

    def document(self) -> dict[str, Any]:
        """All but the charts, as JSON values."""
        tables = [
            {
                "title": table.title,
                "columns": [asdict(column) for column in table.columns],
                "rows": table.rows,
                "note": table.note,
            }
            for table in self.tables
        ]
        whole = {
            "command": self.command,
            "title": self.title,
            "chairlift": __version__,
            "interrupted": self.interrupted,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "notes": self.notes,
            "tables": tables,
            "data": self.data,
        }
        plain = _plain(whole)
        assert isinstance(plain, dict)
        return plain


def line(report: Report) -> str:
    """The document as one line of ASCII: no terminal, pipe or locale can break it."""
    return json.dumps(report.document(), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON values only: what is no number becomes null, and tuples become lists."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    return str(value)


def number(value: Cell) -> str:
    """A cell as people read it: three figures, no exponent; whole numbers whole; a dash for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "–"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def clean(text: str) -> str:
    """Text from a server without what a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a report goes besides stdout."""

    json: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Finds out before the run whether the files can be written after it. Raises ChairliftError."""
        from chairlift.bench import html

        for flag, path in (("--json", self.json), ("--html", self.html)):
            if path is not None:
                _check_writable(flag, path)
        if self.html is not None:
            html.require_matplotlib()


def _check_writable(flag: str, path: Path) -> None:
    was_there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ChairliftError(f"{flag}: cannot write {path}: {error.strerror}") from None


def emit(report: Report, output: Output, *, interrupted: bool = False, stdout: IO[str] | None = None) -> None:
    """Tells it everywhere. Raises ChairliftError for a file that could not be written, after the last line."""
    report = replace(report, interrupted=report.interrupted or interrupted)
    out = sys.stdout if stdout is None else stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a table may hold letters that the locale lacks
    try:
        _print(report, out)
        wrong = _write_files(report, output)
    finally:
        out.write(line(report) + "\n")
        out.flush()
    if wrong:
        raise ChairliftError("; ".join(wrong))


def _write_files(report: Report, output: Output) -> list[str]:
    wrong: list[str] = []
    if output.json is not None:
        wrong += _write("--json", output.json, line(report) + "\n")
    if output.html is not None:
        from chairlift.bench import html

        wrong += _write("--html", output.html, html.page(report))
    return wrong


def _write(flag: str, path: Path, text: str) -> list[str]:
    try:
        path.write_bytes(text.encode("utf-8", errors="replace"))
    except OSError as error:
        return [f"{flag}: cannot write {path}: {error.strerror}"]
    return []


def _print(report: Report, out: IO[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False, width=None if out.isatty() else _PIPE_WIDTH)

    def say(text: str, style: str = "") -> None:
        console.print(Text(clean(text), style=style))

    say(report.title, "bold")
    if report.interrupted:
        say("interrupted: this is what was measured until then", "bold yellow")
    for table in report.tables:
        _print_table(console, table)
    for sentence in report.verdict:
        say(sentence)
    for warning in report.warnings:
        say(f"warning: {warning}", "yellow")
    for note in report.notes:
        say(note, "dim")


def _print_table(console: Console, table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(title=Text(clean(table.title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        head = f"{column.title}\n{column.unit}" if column.unit else column.title
        grid.add_column(Text(clean(head)), justify=column.align, vertical="top")
    for row in table.rows:
        grid.add_row(*(Text(clean(number(cell))) for cell in row))
    console.print(grid)
    if table.note:
        console.print(Text(clean(table.note), style="dim"))
