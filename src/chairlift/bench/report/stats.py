"""Statistics of plain numbers: percentiles, spreads, medians. Pure.

A percentile is an observed value by nearest rank: the smallest value that at least p % of the values do not exceed. It
is reported with the number of values behind it. The "p99" of 20 values is the largest of them, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from statistics import fmean, median
from typing import Any


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank in ascending values. Raises ValueError if there are none."""
    if not ordered:
        raise ValueError("no values")
    return ordered[max(1, math.ceil(percent * len(ordered) / 100)) - 1]


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def median_of(values: Iterable[float | None]) -> float | None:
    """Median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in a few figures."""

    num: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the values that are known; None if none is."""
        ordered = sorted(float(value) for value in values if value is not None)
        if not ordered:
            return None
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(len(ordered), fmean(ordered), p50, p95, p99, ordered[-1])

    def is_max(self, percent: float) -> bool:
        """Whether there are so few values that this percentile is the largest of them."""
        return math.ceil(percent * self.num / 100) == self.num

    def as_dict(self) -> dict[str, Any]:
        """Seconds or tokens for the JSON. An infinite value (a request that was never answered) becomes null."""
        shown = {name: round(value, 6) if math.isfinite(value) else None for name, value in asdict(self).items()}
        return shown | {"is_p99_the_max": self.is_max(99), "is_p95_the_max": self.is_max(95)}


def as_figures(value: Any, *computed: str) -> dict[str, Any]:
    """A dataclass for the JSON: its fields and the named properties, floats rounded to four places."""
    return {name: _figure(getattr(value, name)) for name in (*(field.name for field in fields(value)), *computed)}


def _figure(value: Any) -> Any:
    if is_dataclass(value):
        return value.as_dict() if hasattr(value, "as_dict") else as_figures(value)
    return round(value, 4) if isinstance(value, float) else value
