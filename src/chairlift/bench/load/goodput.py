"""Goodput: the share and the rate of requests that kept every objective. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chairlift.bench.client.sample import Sample
from chairlift.bench.load.generator import Window
from chairlift.bench.report.stats import percentile
from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slo:
    """The objectives that a good answer keeps, in seconds; None: not asked for."""

    ttft: float | None = None
    visible: float | None = None
    itl: float | None = None  # for the 95th percentile of the request's own gaps
    tpot: float | None = None  # for the mean time per token
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=1,itl=0.2`. Raises ConfigError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|visible|itl|tpot|e2e)=(\d*\.?\d+)\s*", part)
            if match is None:
                hint = "ttft=1,itl=0.2; of ttft, visible, itl, tpot, e2e, in seconds"
                raise ConfigError(f"--slo: {part!r} is no objective", hint=hint)
            limits[match[1]] = float(match[2])
        return cls(**limits)

    def is_met(self, sample: Sample) -> bool:
        """Whether a request kept every objective. One that cannot be measured (TTFT without streaming) is not met."""
        gaps = sorted(sample.itl_s)
        seen = (
            (self.ttft, sample.first_token_s),
            (self.visible, sample.first_visible_s),
            (self.itl, percentile(gaps, 95) if gaps else 0.0 if sample.token_times else None),
            (self.tpot, sample.tpot_s if sample.num_output_tokens != 1 else 0.0),
            (self.e2e, sample.e2e_s),
        )
        met = all(limit is None or (value is not None and value <= limit) for limit, value in seen)
        return sample.is_ok and met

    def as_dict(self) -> dict[str, float]:
        """The objectives that were set."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit:g} s" for name, limit in self.as_dict().items())


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that kept every objective."""

    slo_s: Slo
    num_met: int
    share: float  # share of all measured requests, the failed ones included
    requests_per_s: float  # in the window, by that share

    @classmethod
    def of(cls, slo: Slo, samples: Sequence[Sample], window: Window) -> Goodput:
        """By the measured samples of a window."""
        met = sum(map(slo.is_met, samples))
        ended = sum(window.contains(attempt.sample.ended_s) for attempt in window.attempts)
        share = met / len(samples) if samples else 0.0
        return cls(slo, met, share, share * ended / window.seconds if window.seconds else 0.0)
