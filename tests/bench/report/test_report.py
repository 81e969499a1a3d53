"""How results are told: the last line, files checked before the run, pages that need nothing, ends by Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from chairlift.bench.client.target import ApiChoice, ConnectOptions
from chairlift.bench.options import with_options
from chairlift.bench.report import measure
from chairlift.bench.report import page as html
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import (
    Chart,
    Column,
    Lane,
    Report,
    ReportFiles,
    Series,
    Span,
    Table,
    clean,
    emit,
    line,
    number,
)
from chairlift.errors import ChairliftError

HOSTILE = "<script>alert('$x^2$')</script> & \"é漢\" \x1b[31m \u202e"

CHARTS = [
    Chart("cdf", f"TTFT {HOSTILE}", "TTFT, s", "requests, %", [Series(HOSTILE, [0.1, 0.4, 0.2]), Series("b", [1.0])]),
    Chart("cdf", "none", "ITL, ms", "gaps, %", [Series("empty", [])], log_x=True),
    Chart(
        "lines", "throughput", "users", "tokens/s", [Series("out", [1, 2, 5], [10.0, 19.0, 30.0])], marks=[(2, HOSTILE)]
    ),
    Chart("bars", "policies", "policy", "s", [Series("p50", ["a", HOSTILE], [1, 2]), Series("p95", ["a"], [3])]),
    Chart("timeline", "rows", "s", "", lanes=[Lane(HOSTILE, [Span("queued", 0, 1), Span("decode", 1, 2)])] * 130),
]


def report(**given: object) -> Report:
    table = Table(HOSTILE, [Column("name", align="left"), Column("TTFT", "s")], [(HOSTILE, 0.5), ("b", math.nan)], "n")
    facts = {
        "title": f"a title {HOSTILE}",
        "tables": [table],
        "charts": CHARTS,
        "warnings": [HOSTILE],
        "verdict": ["v"],
    }
    return Report("bench x", **{**facts, **given})  # type: ignore[arg-type]


def told(what: Report, encoding: str = "utf-8", output: ReportFiles | None = None) -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    emit(what, output or ReportFiles(), stdout=out)
    out.flush()
    return raw.getvalue().decode(encoding)


NUMBERS = st.floats() | st.integers() | st.text(max_size=20) | st.none()


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), NUMBERS | st.lists(NUMBERS, max_size=3)), st.text(max_size=20))
def test_the_last_line_is_the_document_whatever_the_values(data: dict[str, object], name: str) -> None:
    """A NaN, a newline or a lone surrogate from a server that makes the one line that programs read unreadable."""
    what = report(title=name, data=data, charts=[])
    last = told(what).splitlines()[-1] if "\x85" not in name else told(what).rstrip("\n").split("\n")[-1]
    document = json.loads(last, parse_constant=lambda word: pytest.fail(word))
    assert document["title"] == name
    assert set(document["data"]) == set(data)
    for key, value in data.items():
        if isinstance(value, float) and not math.isfinite(value):
            assert document["data"][key] is None


def test_any_terminal_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document folded at forty columns, or a run of an hour lost to a locale without dashes."""
    monkeypatch.setenv("COLUMNS", "20")
    lines = told(report(), "ascii").split("\n")
    assert lines[-1] == ""
    assert json.loads(lines[-2]) == report().document()
    assert lines[-2].isascii()


def test_what_a_terminal_obeys_is_not_printed() -> None:
    """A model's name that colours the screen, or hides what follows it."""
    text = told(report())
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "warning: <script>" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123456, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1,234"), (7, "7"), (0.0, "0"), (-0.5, "-0.500"),
     (math.nan, "–"), (math.inf, "–"), (None, "–"), ("as is", "as is"), (1e-9, "0.000000"), (2**70, f"{2**70:,}")],
)  # fmt: skip
def test_numbers_are_shown_with_three_figures(value: float | str | None, shown: str) -> None:
    """A table that claims microseconds, or that shows 1e+03."""
    assert number(value) == shown


def test_files_hold_what_the_last_line_says(tmp_path: Path) -> None:
    """A file that was made from other values than those shown."""
    output = ReportFiles(tmp_path / "a.json", tmp_path / "a.html")
    output.check()
    assert list(tmp_path.iterdir()) == []
    what = report(charts=CHARTS[:1])
    text = told(what, output=output)
    assert (tmp_path / "a.json").read_text() == text.split("\n")[-2] + "\n"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == html.page(what)


def test_files_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    """An hour of measuring that ends in "no such directory"."""
    for output in (ReportFiles(json=tmp_path), ReportFiles(html=tmp_path / "no" / "a.html")):
        with pytest.raises(ChairliftError, match="cannot write"):
            output.check()


def test_a_disk_that_fills_up_does_not_take_the_result(tmp_path: Path) -> None:
    """A result that is lost because its copy could not be written."""
    out = io.StringIO()
    with pytest.raises(ChairliftError, match="--json: cannot write"):
        emit(report(), ReportFiles(json=tmp_path), stdout=out)
    assert json.loads(out.getvalue().split("\n")[-2]) == report().document()


def test_a_picture_that_cannot_be_drawn_does_not_take_the_result(tmp_path: Path) -> None:
    """An hour of measuring lost to a chart of the wrong shape."""
    what = report(charts=[Chart("lines", "t", "x", "y", [Series("s", [1.0, 2.0], [1.0])])])
    out = io.StringIO()
    with pytest.raises(ValueError, match="same first dimension"):
        emit(what, ReportFiles(html=tmp_path / "a.html"), stdout=out)
    assert json.loads(out.getvalue().split("\n")[-2]) == what.document()


def test_pictures_without_matplotlib_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback after the run, where a package is missing that few need."""
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(ChairliftError, match="matplotlib") as found:
        ReportFiles(html=tmp_path / "a.html").check()
    assert "plots" in found.value.hint
    ReportFiles(json=tmp_path / "a.json").check()


class Reader(HTMLParser):
    """Checks that what opens is closed, and keeps what a browser would act on."""

    EMPTY = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "srcset", "action", "data") or name.startswith("on"):
                self.links.append(f"{name}={value}")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return html.page(report(interrupted=True))


def test_the_page_needs_nothing_else(page: str) -> None:
    """A page that is blank on a machine without network, or that tells somebody it was opened."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(reader.seen)
    assert all(link.startswith("xlink:href=#") for link in reader.links)
    assert not {"@import", "src:"} & set(page.split())
    assert "url(http" not in page
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("xlink:href=#") for link in reader.links} <= set(reader.ids)
    assert reader.seen.count("svg") == len(CHARTS)


def test_hostile_names_stay_text(page: str) -> None:
    """A server that names its model so that the report runs a script in the reader's browser."""
    reader = Reader()
    reader.feed(page)
    shown = clean(HOSTILE)
    assert reader.text.count(shown) >= 5 + 120  # title, warning, cell; names and marks in pictures; a lane each
    assert "<script" not in page
    assert "\x1b" not in page


def test_equal_reports_make_equal_pages(page: str) -> None:
    """A regenerated page that differs in nothing but noise."""
    assert html.page(report(interrupted=True)) == page
    assert "currentColor" in page
    assert "#010203" not in page


def test_a_timeline_of_too_many_says_so(page: str) -> None:
    """Rows that are dropped without a word."""
    assert "the first 120 of 130 requests" in page


def interrupt(number: signal.Signals) -> tuple[int | None, list[str]]:
    """Runs a command that is ended by a signal after its second measurement."""
    measured: list[int] = []

    class Measured:
        async def work(self, progress: ProgressDisplay) -> None:
            measured.append(1)
            measured.append(2)
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

        def report(self) -> Report:
            return Report("bench x", "half", data={"measured": measured})

    app = typer.Typer()

    @app.command()
    @with_options
    def command(files: ReportFiles) -> None:
        measure.measure(files, Measured())

    result = CliRunner().invoke(app, [])
    return result.exit_code, result.stdout.split("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_tells_what_it_has(number: signal.Signals) -> None:
    """Ctrl-C after twenty minutes that leaves nothing but a traceback."""
    before = signal.getsignal(signal.SIGTERM)
    status, lines = interrupt(number)
    assert status == measure.INTERRUPTED
    assert json.loads(lines[-2])["interrupted"] is True
    assert json.loads(lines[-2])["data"] == {"measured": [1, 2]}
    assert "interrupted: this is what was measured until then" in lines
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("tables", "is_told"), [([], False), ([Table("t", [Column("c")], [[1]])], True)])
def test_a_server_that_dies_takes_nothing_with_it(
    tables: list[Table], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps measured, one line of error; or a table of dashes for a server that never was."""

    class Gone:
        async def work(self, progress: ProgressDisplay) -> None:
            raise ChairliftError("it is gone")

        def report(self) -> Report:
            return Report("bench x", "half", tables)

    with pytest.raises(ChairliftError, match="it is gone"):
        measure.measure(ReportFiles(), Gone())
    out = capsys.readouterr().out
    assert bool(out) is is_told
    if is_told:
        document = json.loads(out.splitlines()[-1])
        assert (document["interrupted"], document["warnings"]) == (True, ["ended early: it is gone"])


def test_shared_options_reach_the_command(tmp_path: Path) -> None:
    """A flag that is parsed and then ignored."""
    app = typer.Typer()
    seen: list[tuple[ConnectOptions, ReportFiles]] = []

    @app.command()
    @with_options
    def command(url: str, server: ConnectOptions, files: ReportFiles, extra: int = 3) -> None:
        seen.append((server, files))
        assert (url, extra) == ("u", 4)

    asked = ["--model", "m", "--api", "completions", "--api-key", "k", "--timeout", "2.5"]
    result = CliRunner().invoke(app, ["u", "--extra", "4", *asked, "--json", str(tmp_path / "a.json")])
    assert result.exit_code == 0, result.output
    assert seen == [(ConnectOptions("m", ApiChoice.COMPLETIONS, "k", 2.5), ReportFiles(tmp_path / "a.json"))]
    assert line(report())


def test_the_machine_is_told_only_where_it_is_known() -> None:
    """Figures of a distant server under the name of the laptop that asked."""
    assert measure.is_local("http://[::1]:80/v1")
    assert measure.is_local("http://localhost:1")
    assert not measure.is_local("http://example.org")
    assert "not known from here" in measure.machine_note("https://example.org/v1")
    assert "GiB" in measure.machine_note(None)
    assert "Something else was at work" in measure.load_notes(2.0)[0]
    assert len(measure.load_notes(0.1)) == 1
