"""A report as one HTML file that needs nothing else: no scripts, no fonts, pictures inside."""

from __future__ import annotations

from html import escape
from importlib.util import find_spec

from chairlift.bench.report import Report, clean, number
from chairlift.errors import ChairliftError


def require_matplotlib() -> None:
    """Raises ChairliftError where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise ChairliftError(
            "--html draws with matplotlib, which is not installed", hint="pip install 'chairlift[plots]'"
        )


def page(report: Report) -> str:
    """The file's text; equal reports make equal bytes."""
    parts = ["<!doctype html>", f"<title>{_text(report.title)}</title>"]
    for table in report.tables:
        rows = "".join(f"<tr>{''.join(f'<td>{_text(number(cell))}' for cell in row)}" for row in table.rows)
        parts.append(f"<h2>{_text(table.title)}</h2><table>{rows}</table>")
    return "\n".join(parts)


def _text(text: str) -> str:
    return escape(clean(text))
