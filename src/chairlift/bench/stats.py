"""What a run's requests amount to: pure functions from samples to figures. Times in seconds, rates per second.

A percentile is an observed value (nearest rank: the smallest that at least p % do not exceed), and carries the number
of values behind it: of 20 values the "p99" is the largest, and is said to be.

Latencies are those of the *measured* requests that were answered. Throughput is what arrived within the window, of
every request that was under way: those that began before it or ended after it worked in it too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from chairlift.bench.load import Shot, Window
from chairlift.bench.sample import Failure, Sample
from chairlift.bench.workload import Closed
from chairlift.errors import ConfigError

STALL_S = 1.0
STALL_MEDIANS = 4.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank of ascending values; ValueError for none."""
    if not ordered:
        raise ValueError("no values")
    return ordered[max(1, math.ceil(percent * len(ordered) / 100)) - 1]


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
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(len(ordered), fmean(ordered), p50, p95, p99, ordered[-1])

    def is_max(self, percent: float) -> bool:
        """Whether that percentile is nothing but the largest value, for want of values."""
        return math.ceil(percent * self.num / 100) == self.num

    def as_dict(self) -> dict[str, Any]:
        """For the JSON; what never came (infinite) is null."""
        figures = {"mean": self.mean, "p50": self.p50, "p95": self.p95, "p99": self.p99, "max": self.max}
        shown = {name: round(value, 6) if math.isfinite(value) else None for name, value in figures.items()}
        return {"num": self.num, **shown, "is_p99_the_max": self.is_max(99), "is_p95_the_max": self.is_max(95)}


def stalls(gaps: Sequence[float]) -> tuple[float, ...]:
    """The gaps of one stream in which a reader thinks that it has hung: over 1 s and over 4 x the stream's median."""
    if not gaps:
        return ()
    limit = max(STALL_S, STALL_MEDIANS * median(gaps))
    return tuple(gap for gap in gaps if gap > limit)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Over all streams that have gaps."""

    num: int
    num_streams_hit: int
    num_streams: int
    longest_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Stalls:
        """Failed streams count too: a stall is often why."""
        streams = [sample.itl_s for sample in samples if sample.itl_s]
        found = [stalls(gaps) for gaps in streams]
        longest = max((max(each) for each in found if each), default=0.0)
        return cls(sum(map(len, found)), sum(map(bool, found)), len(streams), longest)


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer must keep to be a good one; seconds, None: not asked for."""

    ttft: float | None = None
    visible: float | None = None
    itl: float | None = None
    """The 95th percentile of the request's own gaps."""
    tpot: float | None = None
    """The mean time per token."""
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=1,itl=0.2`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|visible|itl|tpot|e2e)=(\d*\.?\d+)\s*", part)
            if match is None:
                hint = "ttft=1,itl=0.2; of ttft, visible, itl, tpot, e2e, in seconds"
                raise ConfigError(f"--slo: {part!r} is no objective", hint=hint)
            limits[match[1]] = float(match[2])
        return cls(**limits)

    def is_met(self, sample: Sample) -> bool:
        """A failed request meets nothing; what cannot be measured (a first token without streaming) is not met."""
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
        """The limits that were set."""
        named = {"ttft": self.ttft, "visible": self.visible, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept every objective."""

    slo: Slo
    num_met: int
    num_requests: int
    per_s: float
    """Of the window, by the share of the measured requests that met it."""

    @property
    def share(self) -> float:
        """Of all measured requests, the failed ones included."""
        return self.num_met / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class Little:
    """Little's law of a closed loop: users = throughput x (think time + latency), if figures and window are right."""

    users: int
    think_s: float
    latency_s: float
    measured_per_s: float

    @property
    def expected_per_s(self) -> float:
        """N / (think + latency)."""
        turn_s = self.think_s + self.latency_s
        return self.users / turn_s if turn_s else 0.0

    @property
    def ratio(self) -> float:
        """Measured / expected: near 1."""
        return self.measured_per_s / self.expected_per_s if self.expected_per_s else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Capacity, of all requests together: nobody feels these. Tokens and requests per second of the window."""

    requests: float
    """Answered."""
    due: float
    """Requests that fell due in the window; those that were given up at its end are taken for such."""
    prompt_tokens: float
    """Of prompts whose answer began in the window; those found in a cache included."""
    output_tokens: float
    in_flight: float
    """Requests between dispatch and end, on average."""

    @property
    def total_tokens(self) -> float:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of one run against one server."""

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    ttft: Spread | None
    visible: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    e2e_with_failures: Spread | None
    """A request that failed counts as never answered (infinite)."""
    dispatch: Spread | None
    num_held: int
    stalls: Stalls
    rates: Rates
    prompt_tokens: Spread | None
    prompt_asked: Spread | None
    output_tokens: Spread | None
    output_asked: Spread | None
    num_short: int
    """Answers with fewer tokens than asked for, by usage."""
    cache_hit_rate: float | None
    """Of the prompt tokens by usage; None where the server does not say."""
    tokens_per_event: float | None
    are_tokens_estimated: bool
    is_streamed: bool
    growth: float | None
    """Mean E2E of the later half of the requests / that of the earlier."""
    fastest_stream: float | None
    """Tokens/s of the fastest stream, from its first token to its last."""
    goodput: Goodput | None
    little: Little | None

    @property
    def failure_rate(self) -> float:
        """Of the measured requests."""
        return (self.num_requests - self.num_ok) / self.num_requests if self.num_requests else 0.0

    @property
    def num_refused(self) -> int:
        """503s: the server said that it is full."""
        return self.failures.get(str(Failure.HTTP_503), 0)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        spreads = ("ttft", "visible", "itl", "tpot", "e2e", "e2e_with_failures", "dispatch")
        lengths = ("prompt_tokens", "prompt_asked", "output_tokens", "output_asked")
        named = {f"{name}_s": getattr(self, name) for name in spreads} | {name: getattr(self, name) for name in lengths}
        return {
            "num_requests": self.num_requests,
            "num_ok": self.num_ok,
            "num_failed": self.num_requests - self.num_ok,
            "failure_rate": round(self.failure_rate, 4),
            "failures": self.failures,
            "num_503": self.num_refused,
            **{name: None if spread is None else spread.as_dict() for name, spread in named.items()},
            "num_held": self.num_held,
            "stalls": {
                "num": self.stalls.num,
                "num_streams_hit": self.stalls.num_streams_hit,
                "num_streams": self.stalls.num_streams,
                "longest_s": round(self.stalls.longest_s, 4),
            },
            "capacity": {
                "requests_per_s": round(self.rates.requests, 4),
                "due_per_s": round(self.rates.due, 4),
                "prompt_tokens_per_s": round(self.rates.prompt_tokens, 2),
                "output_tokens_per_s": round(self.rates.output_tokens, 2),
                "total_tokens_per_s": round(self.rates.total_tokens, 2),
                "mean_in_flight": round(self.rates.in_flight, 3),
            },
            "num_short_answers": self.num_short,
            "cache_hit_rate": _rounded(self.cache_hit_rate),
            "tokens_per_event": _rounded(self.tokens_per_event),
            "are_tokens_estimated": self.are_tokens_estimated,
            "is_streamed": self.is_streamed,
            "e2e_growth": _rounded(self.growth),
            "fastest_stream_tokens_per_s": _rounded(self.fastest_stream),
            "goodput": self.goodput and _goodput_dict(self.goodput),
            "little": self.little and _little_dict(self.little),
        }


def summarise(window: Window, slo: Slo | None = None) -> Summary:
    """The figures of a run."""
    shots = window.measured
    samples = [shot.sample for shot in shots]
    good = [sample for sample in samples if sample.is_ok]
    e2e = [sample.e2e_s for sample in good]
    rates = _rates(window)
    counted = [sample for sample in good if sample.num_output_tokens is not None]
    return Summary(
        num_requests=len(samples),
        num_ok=len(good),
        failures=dict(Counter(str(sample.failure) for sample in samples if sample.failure is not None).most_common()),
        ttft=Spread.of(value for sample in good if (value := sample.first_token_s) is not None),
        visible=Spread.of(value for sample in good if (value := sample.first_visible_s) is not None),
        itl=Spread.of(gap for sample in good for gap in sample.itl_s),
        tpot=Spread.of(value for sample in good if (value := sample.tpot_s) is not None),
        e2e=Spread.of(e2e),
        e2e_with_failures=Spread.of([*e2e, *[math.inf] * (len(samples) - len(good))]),
        dispatch=Spread.of(sample.dispatch_delay_s for sample in samples),
        num_held=sum(shot.was_held for shot in shots),
        stalls=Stalls.of(samples),
        rates=rates,
        prompt_tokens=Spread.of(float(s.num_prompt_tokens) for s in good if s.num_prompt_tokens is not None),
        output_tokens=Spread.of(float(s.num_output_tokens or 0) for s in counted),
        prompt_asked=Spread.of(float(shot.job.prompt_tokens) for shot in shots if shot.job.prompt_tokens is not None),
        output_asked=Spread.of(float(shot.job.output_tokens) for shot in shots),
        num_short=sum(_is_short(shot) for shot in shots),
        cache_hit_rate=_cache_hit_rate(good),
        tokens_per_event=_mean(value for sample in good if (value := sample.tokens_per_event) is not None),
        are_tokens_estimated=len(counted) < len(good),
        is_streamed=any(sample.is_streamed for sample in samples),
        growth=_growth(e2e),
        fastest_stream=max((1 / tpot for sample in good if (tpot := sample.tpot_s)), default=None),
        goodput=None if slo is None else _goodput(slo, samples, window),
        little=_little(window, e2e, rates),
    )


def _is_short(shot: Shot) -> bool:
    achieved = shot.sample.num_output_tokens
    return shot.sample.is_ok and achieved is not None and achieved < shot.job.output_tokens


def _cache_hit_rate(samples: Sequence[Sample]) -> float | None:
    told = [(s.num_cached_tokens, s.num_prompt_tokens) for s in samples if s.num_cached_tokens is not None]
    total = sum(prompt or 0 for _, prompt in told)
    return sum(cached or 0 for cached, _ in told) / total if total else None


def _growth(e2e: Sequence[float]) -> float | None:
    """None for fewer than 20 requests: halves of three say nothing."""
    half = len(e2e) // 2
    return fmean(e2e[-half:]) / fmean(e2e[:half]) if half >= 10 and fmean(e2e[:half]) else None


def _goodput(slo: Slo, samples: Sequence[Sample], window: Window) -> Goodput:
    met = sum(map(slo.is_met, samples))
    ended = sum(window.contains(shot.sample.ended_s) for shot in window.shots)
    share = met / len(samples) if samples else 0.0
    return Goodput(slo, met, len(samples), share * ended / window.seconds if window.seconds else 0.0)


def _little(window: Window, e2e: Sequence[float], rates: Rates) -> Little | None:
    """None where requests failed: who was refused waits as long as the server says, not as long as he thinks."""
    if not isinstance(window.arrivals, Closed) or not e2e or len(e2e) < len(window.measured):
        return None
    return Little(window.arrivals.users, window.mean_pause_s, fmean(e2e), rates.requests)


def _rates(window: Window) -> Rates:
    seconds = window.seconds
    if not seconds:
        return Rates(0.0, 0.0, 0.0, 0.0, 0.0)
    answered, due, prompts, output, busy = 0, window.num_cut, 0, 0.0, 0.0
    for sample in (shot.sample for shot in window.shots):
        began = sample.token_times[0] if sample.token_times else sample.ended_s
        answered += sample.is_ok and window.contains(sample.ended_s)
        due += window.contains(sample.scheduled_s)
        prompts += (sample.num_prompt_tokens or 0) if window.contains(began) else 0
        output += sum(tokens for at_s, tokens in tokens_over_time(sample) if window.contains(at_s))
        busy += max(0.0, min(sample.ended_s, window.end_s) - max(sample.started_s, window.begin_s))
    return Rates(answered / seconds, due / seconds, prompts / seconds, output / seconds, busy / seconds)


def tokens_over_time(sample: Sample) -> list[tuple[float, float]]:
    """(moment, tokens): as the server says for each piece, else its usage spread evenly over the pieces; without
    usage one a piece; without streaming all at the end."""
    pieces = sample.token_events
    if not pieces:
        return [(sample.ended_s, float(sample.num_output_tokens or 0))]
    if all(piece.num_tokens is not None for piece in pieces):
        return [(piece.at_s, float(piece.num_tokens or 0)) for piece in pieces]
    return [(piece.at_s, sample.tokens_per_event or 1.0) for piece in pieces]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _goodput_dict(goodput: Goodput) -> dict[str, Any]:
    return {
        "slo_s": goodput.slo.as_dict(),
        "num_met": goodput.num_met,
        "share": round(goodput.share, 4),
        "requests_per_s": round(goodput.per_s, 4),
    }


def _little_dict(little: Little) -> dict[str, Any]:
    return {
        "users": little.users,
        "mean_think_s": round(little.think_s, 4),
        "mean_latency_s": round(little.latency_s, 4),
        "expected_requests_per_s": round(little.expected_per_s, 4),
        "measured_requests_per_s": round(little.measured_per_s, 4),
        "ratio": round(little.ratio, 4),
    }
