"""Charts as inline SVG, drawn by matplotlib without a display.

Axes and text have one colour that becomes `currentColor` in the SVG, so that a page's dark mode changes it. Series have
middle tones, which are visible on white and on black. Equal charts make equal bytes: no dates, no random ids.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chairlift.bench.report.report import Chart, Series, clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"
_COLOURS = ("#3987e5", "#e08a00", "#1fa57a", "#d9534f", "#a070d8", "#8a8f98", "#c2a633", "#d670b0")
_LINES = ("-", "--", "-.", ":")
_SPANS = {"queued": "#9aa0a8", "prefill": "#e08a00", "decode": "#3987e5", "held": "#a070d8", "failed": "#d9534f"}

_MAX_CDF_POINTS = 400
"""A curve of 5,000 gaps looks the same with 400 points."""
_MAX_LANES = 120
"""A reader cannot tell more rows apart."""
_WIDTH_IN = 7.6


def svg(chart: Chart, place: int) -> str:
    """One `<svg>` element; `place` sets its ids apart from those of the page's other charts."""
    import matplotlib as mpl

    written = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context(_style(place)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser may have fonts that this machine lacks
        figure(chart).savefig(written, format="svg", metadata=nothing, transparent=True)
    text = written.getvalue().decode("utf-8", errors="replace")
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>c{place}-", text)


def _style(place: int) -> dict[Any, Any]:
    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    )
    return {
        **ink,
        "svg.hashsalt": f"chairlift {place}",
        "svg.fonttype": "none",
        "text.parse_math": False,  # a model's name may hold dollars
        "axes.unicode_minus": False,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
        "font.size": 9.0,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.18,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }


def figure(chart: Chart) -> Figure:
    """The drawing without a title, which the page has."""
    from matplotlib.figure import Figure

    shown = min(len(chart.lanes), _MAX_LANES)
    height = 1.3 + 0.2 * shown if chart.kind == "timeline" else 3.4
    num_bars = len({str(x) for series in chart.series for x in series.x}) * len(chart.series)
    width = min(_WIDTH_IN, 1.6 + 0.8 * num_bars) if chart.kind == "bars" else _WIDTH_IN
    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_xlabel(clean(chart.x_label))
    axes.set_ylabel(clean(chart.y_label))
    _DRAW[chart.kind](axes, chart)
    for at, said in chart.marks:
        axes.axvline(at, color=_INK, alpha=0.5, linestyle=":", linewidth=1)
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(clean(said), (at, 1), (3, -3), va="top", **where)
    if len(axes.get_legend_handles_labels()[1]) > 1 or chart.kind == "timeline":
        drawn.legend(loc="outside upper left", ncols=4)
    return drawn


def _cdf(axes: Axes, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        values = sorted(float(value) for value in series.x if math.isfinite(float(value)))
        if not values:
            continue
        keep = min(len(values), _MAX_CDF_POINTS)
        ranks = [round(i * (len(values) - 1) / max(1, keep - 1)) for i in range(keep)]
        x = [values[0], *(values[rank] for rank in ranks)]
        y = [0.0, *(100 * (rank + 1) / len(values) for rank in ranks)]
        axes.step(x, y, where="post", **_pen(place, series))
    axes.set_ylim(0, 102)
    if chart.log_x:
        _logarithmic(axes)
    else:
        axes.set_xlim(left=0)


def _lines(axes: Axes, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        marker = "o" if len(series.x) <= 30 else ""
        axes.plot(
            list(map(float, series.x)), list(map(float, series.y)), marker=marker, markersize=4, **_pen(place, series)
        )
    axes.set_ylim(bottom=0)
    points = sorted({float(x) for series in chart.series for x in series.x})
    if chart.log_x:
        _logarithmic(axes)
    elif 0 < len(points) <= 8:
        axes.set_xticks(points, [f"{point:g}" for point in points])


def _bars(axes: Axes, chart: Chart) -> None:
    names = list(dict.fromkeys(str(x) for series in chart.series for x in series.x))
    width = 0.8 / max(1, len(chart.series))
    for place, series in enumerate(chart.series):
        shift = (place - (len(chart.series) - 1) / 2) * width
        at = [names.index(str(x)) + shift for x in series.x]
        colour = _COLOURS[place % len(_COLOURS)]
        bars = axes.bar(at, list(map(float, series.y)), width * 0.92, label=clean(series.name), color=colour)
        axes.bar_label(bars, [number(float(y)) for y in series.y], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), [clean(name) for name in names])
    axes.margins(y=0.12)  # room for the numbers above the bars
    axes.grid(visible=False, axis="x")


def _timeline(axes: Axes, chart: Chart) -> None:
    lanes = chart.lanes[:_MAX_LANES]
    for kind, colour in _SPANS.items():
        spans = [(row, span) for row, lane in enumerate(lanes) for span in lane.spans if span.kind == kind]
        if spans:
            rows, widths = [row for row, _ in spans], [span.end_s - span.start_s for _, span in spans]
            axes.barh(rows, widths, 0.72, [span.start_s for _, span in spans], color=colour, label=kind)
    axes.set_yticks(range(len(lanes)), [clean(lane.label) for lane in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    if len(lanes) < len(chart.lanes):
        axes.set_xlabel(f"{clean(chart.x_label)} (the first {len(lanes)} of {len(chart.lanes)} requests)")


_DRAW: dict[str, Callable[[Axes, Chart], None]] = {"cdf": _cdf, "lines": _lines, "bars": _bars, "timeline": _timeline}


def _pen(place: int, series: Series) -> dict[str, Any]:
    return {
        "label": clean(series.name),
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": _LINES[place % len(_LINES)],
        "linewidth": 1.6,
    }


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
