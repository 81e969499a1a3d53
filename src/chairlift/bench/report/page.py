"""A report as one HTML file without scripts or fonts, with its charts inside. Equal reports make equal bytes.

The layout is in page.html.j2. Its text may come from a server, so jinja2 escapes all of it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from chairlift.bench.report.report import Report, clean, number
from chairlift.errors import ChairliftError


def require_matplotlib() -> None:
    """Raises ChairliftError if charts cannot be drawn."""
    if find_spec("matplotlib") is None:
        hint = "it comes with the extra `plots`: scripts/setup plots, or pip install '.[plots]'"
        raise ChairliftError("--html draws with matplotlib, which is not installed", hint=hint)


def page(report: Report) -> str:
    """The text of the file. Raises ChairliftError without matplotlib."""
    require_matplotlib()
    from jinja2 import Environment

    from chairlift.bench.report.charts import svg

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"clean": clean, "number": number, "svg": svg}
    layout = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(layout).render(report=report)
