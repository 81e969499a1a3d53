"""A report as one HTML file: no scripts or fonts, pictures inside. Equal reports make equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec

from chairlift.bench.report import Chart, Report, Table, clean, number
from chairlift.errors import ChairliftError

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""

_STYLE = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #5c626b; --rule: #d5d8dc; --alarm: #a33b00; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e4e6e9; --soft: #a0a6ae; --rule: #3a3e44; --alarm: #ffa869; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; overflow-wrap: normal; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .7rem; text-align: right; vertical-align: top; }
th { font-weight: 600; } th span { color: var(--soft); display: block; font-weight: 400; }
.left { text-align: left; }
figure { margin: 0; } svg { height: auto; max-width: 100%; }
svg text { font-family: system-ui, sans-serif !important; }
.note { color: var(--soft); font-size: .9rem; }
.warning { border-left: 3px solid var(--alarm); padding-left: .7rem; }"""


def require_matplotlib() -> None:
    """Raises ChairliftError where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        hint = "it comes with the extra `plots`: scripts/setup plots, or pip install '.[plots]'"
        raise ChairliftError("--html draws with matplotlib, which is not installed", hint=hint)


def page(report: Report) -> str:
    """The file's text. Raises ChairliftError without matplotlib."""
    require_matplotlib()
    return "\n".join(
        [
            _HEAD,
            f"<title>{_text(report.title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            f"</head>\n<body>\n<h1>{_text(report.title)}</h1>",
            *_lines(["Interrupted: this is what was measured until then."] if report.interrupted else [], "warning"),
            *_lines(report.warnings, "warning"),
            *_lines(report.verdict, "verdict"),
            *(part for table in report.tables for part in _table(table)),
            *(part for place, chart in enumerate(report.charts) for part in _chart(chart, place)),
            *_lines(report.notes, "note"),
            "</body>\n</html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(clean(text))


def _lines(said: Sequence[str], kind: str) -> Iterator[str]:
    return (f'<p class="{kind}">{_text(sentence)}</p>' for sentence in said)


def _table(table: Table) -> Iterator[str]:
    kinds = [f' class="{column.align}"' if column.align == "left" else "" for column in table.columns]
    heads = [
        f"<th{kind}>{_text(column.title)}{f'<span>{_text(column.unit)}</span>' if column.unit else ''}</th>"
        for kind, column in zip(kinds, table.columns, strict=True)
    ]
    yield f'<h2>{_text(table.title)}</h2>\n<div class="scroll"><table>'
    yield f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"
    for row in table.rows:
        cells = (f"<td{kind}>{_text(number(cell))}</td>" for kind, cell in zip(kinds, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    yield from _lines([table.note] if table.note else [], "note")


def _chart(chart: Chart, place: int) -> Iterator[str]:
    from chairlift.bench.charts import svg

    yield f'<h2>{_text(chart.title)}</h2>\n<figure role="img" aria-label="{_text(chart.title)}">'
    yield svg(chart, place)
    yield "</figure>"
