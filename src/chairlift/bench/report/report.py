"""The result of a measurement as plain data, and how it is printed and written: text, HTML, one JSON document.

    command ── Report ──┬── stdout   title, tables, verdict, warnings, notes
                        ├── --json   the document
                        ├── --html   one file with the charts (page.py)
                        └── stdout   the document again as the last line, even if a file could not be written

Progress goes to stderr (measure.py), so that a pipe carries results only.
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
from chairlift.bench.options import option
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | int | float | None
"""A value in a table. None, NaN and infinity are shown as a dash and are null in JSON."""

_PIPE_WIDTH = 160
"""Characters of a line when stdout is a file or a pipe."""


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column. The unit stands under the title and applies to every number below."""

    title: str
    unit: str = ""
    align: Literal["left", "right"] = "right"


def columns(*heads: str) -> list[Column]:
    """Columns by title: "output|tokens/s" has a unit, and "<policy" is aligned left."""
    parts = [head.removeprefix("<").partition("|") for head in heads]
    sides: list[Literal["left", "right"]] = ["left" if head.startswith("<") else "right" for head in heads]
    return [Column(title, unit, side) for (title, _, unit), side in zip(parts, sides, strict=True)]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with one cell for each column. The note says what a reader must know to read the table."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. A cdf takes raw values in `x` and computes `y` itself; bars may have words in `x`."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a timeline's row, in seconds from the start of the run."""

    kind: Literal["queued", "prefill", "decode", "held", "failed"]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """The row of one request in a timeline."""

    label: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as data. Axis labels carry their units, as in "TTFT, s"."""

    kind: Literal["cdf", "timeline", "lines", "bars"]
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series] = ()
    lanes: Sequence[Lane] = ()  # of a timeline, which has no series
    log_x: bool = False
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: position and label


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one command. `data` is for programs: plain JSON values, times in seconds, sizes in bytes."""

    command: str  # "bench load"
    title: str
    tables: Sequence[Table] = ()
    verdict: Sequence[str] = ()  # sentences: what the figures mean
    warnings: Sequence[str] = ()  # what makes the figures doubtful
    notes: Sequence[str] = ()  # machine, its load, what was asked for
    data: Mapping[str, Any] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    interrupted: bool = False

    def document(self) -> dict[str, Any]:
        """Everything but the charts, as JSON values."""
        plain: dict[str, Any] = _plain(
            {
                "command": self.command,
                "title": self.title,
                "chairlift": __version__,
                "interrupted": self.interrupted,
                "verdict": self.verdict,
                "warnings": self.warnings,
                "notes": self.notes,
                "tables": [asdict(table) for table in self.tables],
                "data": self.data,
            }
        )
        return plain


def line(report: Report) -> str:
    """The document as one line of ASCII, which no terminal, pipe or locale can break."""
    return json.dumps(report.document(), allow_nan=False)


def _plain(value: Any) -> Any:
    """The value as JSON values only: NaN and infinity become null, tuples become lists."""
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
    """A cell as people read it: three figures without exponent, integers in full, a dash for an unknown value."""
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
    """Text from a server without control characters, which a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The options that say which files a report is written to."""

    json: Path | None = option("Write the result.", metavar="FILE")
    html: Path | None = option("Write a page with pictures.", metavar="FILE")

    def check(self) -> None:
        """Finds out before a run whether the files can be written after it. Raises ChairliftError."""
        from chairlift.bench.report.page import require_matplotlib

        for flag, path in (("--json", self.json), ("--html", self.html)):
            if path is None:
                continue
            is_new = not path.exists()
            try:
                path.open("ab").close()
                if is_new:
                    path.unlink()
            except OSError as error:
                raise ChairliftError(f"{flag}: cannot write {path}: {error.strerror}") from None
        if self.html is not None:
            require_matplotlib()


def emit(report: Report, files: ReportFiles, *, interrupted: bool = False, stdout: IO[str] | None = None) -> None:
    """Prints and writes a report. Raises ChairliftError for files that could not be written, after the last line."""
    report = replace(report, interrupted=report.interrupted or interrupted)
    out = sys.stdout if stdout is None else stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # the locale may lack a letter of a table
    try:
        _print(report, out)
        errors = _write_files(report, files)
    finally:
        out.write(line(report) + "\n")
        out.flush()
    if errors:
        raise ChairliftError("; ".join(errors))


def _write_files(report: Report, files: ReportFiles) -> list[str]:
    """Writes the files; one sentence for each that could not be written."""
    texts = []
    if files.json is not None:
        texts.append(("--json", files.json, line(report) + "\n"))
    if files.html is not None:
        from chairlift.bench.report.page import page

        texts.append(("--html", files.html, page(report)))
    errors = []
    for flag, path, text in texts:
        try:
            path.write_bytes(text.encode("utf-8", errors="replace"))
        except OSError as error:
            errors.append(f"{flag}: cannot write {path}: {error.strerror}")
    return errors


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
