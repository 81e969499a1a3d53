"""The page of experiments and the script that measures it: names that agree, ranges, markers, and a run of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.bench.client.sample import Event, EventKind, Sample
from chairlift.bench.local.server import ObservedRequest, TimedRequest
from chairlift.bench.report.report import Column, Report, Table
from chairlift.errors import ChairliftError
from experiments import scenarios
from experiments.page import EXPERIMENTS, app, markdown, merged, tables, written
from experiments.server import Setup
from support.async_tests import run
from support.paths import ROOT

TinyGGUF = Callable[..., Path]
PAGE = ROOT / "docs" / "experiments.md"


def test_every_experiment_has_its_section_and_the_other_way_round() -> None:
    """A table that nothing measures any more, or an experiment that nobody reads of."""
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^<!-- (\w+) -->$", page, re.MULTILINE) == list(EXPERIMENTS)
    assert re.findall(r"^<!-- /(\w+) -->$", page, re.MULTILINE) == list(EXPERIMENTS)
    sections = page.split("\n## ")[1:]
    assert len(sections) == len(EXPERIMENTS)
    for section, name in zip(sections, EXPERIMENTS, strict=True):
        assert f"<!-- {name} -->" in section
        assert re.search(r"```sh\n(scripts/experiments " + name + r"|chairlift bench .*)\n```", section)
    named = re.findall(r"^scripts/experiments ((?:\w+ ?)+)", page, re.MULTILINE)
    assert {name for words in named for name in words.split()} <= set(EXPERIMENTS)


def test_a_block_is_written_between_its_markers_only() -> None:
    """A run that eats the words around its table, or the next section."""
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\n<!-- /y -->\n"
    once = written(page, "x", r"new \1")
    assert once == "a\n<!-- x -->\n\nnew \\1\n\n<!-- /x -->\nb\n<!-- y -->\n<!-- /y -->\n"
    assert written(once, "x", r"new \1") == once
    with pytest.raises(ChairliftError, match="no place"):
        written(page, "z", "")


def test_rounds_become_ranges() -> None:
    """The best of three runs shown as the figure."""
    columns = [Column("a", align="left"), Column("b", "s"), Column("c"), Column("d")]
    rounds = [[Table("t", columns, [["x", value, 3, None]], "n")] for value in (1.251, 1.0, 1.2)]
    (whole,) = merged(rounds)
    assert whole.rows == [["x", "1.00 to 1.25", "3", "–"]]
    assert markdown(whole).splitlines() == [
        "*t*", "", "| a | b, s | c | d |", "| --- | ---: | ---: | ---: |", "| x | 1.00 to 1.25 | 3 | – |", "", "n"
    ]  # fmt: skip
    assert markdown(Table("", [Column("a|b")], [["c|d"]])).splitlines()[0] == "| a/b |"


def test_tables_survive_the_last_line() -> None:
    """A page with other columns than the command printed."""
    table = Table("t", [Column("a", align="left"), Column("b", "s")], [["x", 1.5]], "n")
    assert tables(Report("bench x", "", [table]).document()) == [table]


def test_only_gaps_beside_the_prompt_are_counted() -> None:
    """Gaps of the quiet time before and after, which make a bad setting look good."""

    def observed(*token_s: float, due_s: float = 0.0) -> ObservedRequest:
        events = tuple(Event(at_s, EventKind.TEXT) for at_s in token_s)
        return ObservedRequest(TimedRequest("", "", 1), Sample(0, due_s, due_s, token_s[-1], True, events), None)

    stream, long = observed(0.5, 0.75, 1.25, 2.25, 2.5, 2.75), observed(2.0, 2.25, due_s=1.0)
    assert scenarios.trade([stream, stream], long) == [1.0, 750.0, 1000.0, 1000.0]
    assert scenarios.trade([observed(0.5, 0.75)], long) == [1.0, None, None, None]


def test_one_experiment_from_command_to_page(tiny_gguf: TinyGGUF, tmp_path: Path) -> None:
    """A script that was last run before the server's answer changed."""
    page = tmp_path / "experiments.md"
    page.write_text("<!-- startup -->\n<!-- /startup -->\n")
    model = str(tiny_gguf())
    done = CliRunner().invoke(app, ["startup", "--docs", str(page), "--model", model, "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "| ready, as seen from outside | " in page.read_text()
    wrong = CliRunner().invoke(app, ["statrup", "--docs", str(page)])
    assert isinstance(wrong.exception, ChairliftError)
    assert "startup" in str(wrong.exception)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_measures_something(name: str, tiny_gguf: TinyGGUF, tmp_path: Path) -> None:
    """A flag that was renamed, found out when somebody has ten quiet minutes."""
    text = tmp_path / "text.md"
    text.write_text("The rope keeps moving. " * 20)
    setup = Setup(str(tiny_gguf(context=8192)), 0.02, str(text))
    found = run(EXPERIMENTS[name].measure(setup))
    assert found
    assert all(len(row) == len(table.columns) for table in found for row in table.rows)
    assert merged([found])
