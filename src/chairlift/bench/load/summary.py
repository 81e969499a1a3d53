"""The figures of one run: pure functions from samples to figures. Times in seconds, rates per second.

Latencies are those of the *measured* requests that were answered. Throughput is what arrived within the window, of
every request that was in flight: those that began before the window or ended after it worked in it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from chairlift.bench.client.sample import Failure, Sample
from chairlift.bench.load.arrivals import ClosedLoop
from chairlift.bench.load.generator import Attempt, Window
from chairlift.bench.load.goodput import Goodput, Slo
from chairlift.bench.report.stats import Spread, mean_of

STALL_S = 1.0
STALL_MEDIANS = 4.0


def stalls(gaps: Sequence[float]) -> tuple[float, ...]:
    """The gaps of one stream that a reader takes for a hang: over 1 s and over 4 x the stream's median."""
    if not gaps:
        return ()
    limit = max(STALL_S, STALL_MEDIANS * median(gaps))
    return tuple(gap for gap in gaps if gap > limit)


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of all streams that have gaps."""

    num: int
    num_streams_hit: int
    num_streams: int
    longest_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Stalls:
        """Failed streams count too, since a stall is often the reason."""
        streams = [sample.itl_s for sample in samples if sample.itl_s]
        found = [stalls(gaps) for gaps in streams]
        longest = max((max(each) for each in found if each), default=0.0)
        return cls(sum(map(len, found)), sum(map(bool, found)), len(streams), longest)


@dataclass(frozen=True, slots=True)
class Little:
    """Little's law of a closed loop: users = throughput x (think time + latency). It holds if the window is steady."""

    users: int
    think_s: float
    latency_s: float
    measured_per_s: float

    @property
    def expected_per_s(self) -> float:
        """users / (think + latency)."""
        turn_s = self.think_s + self.latency_s
        return self.users / turn_s if turn_s else 0.0

    @property
    def ratio(self) -> float:
        """Measured / expected, near 1 in a steady window."""
        return self.measured_per_s / self.expected_per_s if self.expected_per_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        figures = {
            "mean_think_s": self.think_s,
            "mean_latency_s": self.latency_s,
            "expected_requests_per_s": self.expected_per_s,
            "measured_requests_per_s": self.measured_per_s,
            "ratio": self.ratio,
        }
        return {"users": self.users, **{name: round(value, 4) for name, value in figures.items()}}


@dataclass(frozen=True, slots=True)
class Rates:
    """Capacity: tokens and requests per second of the window, of all requests together."""

    requests: float
    """Answered requests."""
    due: float
    """Requests that fell due in the window, and those that were given up at its end."""
    prompt_tokens: float
    """Tokens of prompts whose answer began in the window, cached ones included."""
    output_tokens: float
    in_flight: float
    """Mean number of requests between dispatch and end."""

    @property
    def total_tokens(self) -> float:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    def as_dict(self) -> dict[str, float]:
        """For the JSON."""
        return {
            "requests_per_s": round(self.requests, 4),
            "due_per_s": round(self.due, 4),
            "prompt_tokens_per_s": round(self.prompt_tokens, 2),
            "output_tokens_per_s": round(self.output_tokens, 2),
            "total_tokens_per_s": round(self.total_tokens, 2),
            "mean_in_flight": round(self.in_flight, 3),
        }


@dataclass(frozen=True, slots=True)
class LoadSummary:
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
    """A failed request counts as an infinite time."""
    dispatch: Spread | None
    num_held: int
    stalls: Stalls
    rates: Rates
    prompt_tokens: Spread | None
    prompt_asked: Spread | None
    output_tokens: Spread | None
    output_asked: Spread | None
    num_short: int
    """Answers that have fewer tokens than were asked for, by usage."""
    cache_hit_rate: float | None
    """Share of the prompt tokens, by usage; None if the server tells none."""
    tokens_per_event: float | None
    are_tokens_estimated: bool
    is_streamed: bool
    growth: float | None
    """Mean E2E of the later half of the requests / that of the earlier half."""
    fastest_stream: float | None
    """Tokens/s of the fastest stream, from its first token to its last."""
    goodput: Goodput | None
    little: Little | None

    @property
    def failure_rate(self) -> float:
        """Share of the measured requests."""
        return (self.num_requests - self.num_ok) / self.num_requests if self.num_requests else 0.0

    @property
    def num_refused(self) -> int:
        """Requests that the server refused with a 503, since it was full."""
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
            "stalls": asdict(self.stalls) | {"longest_s": round(self.stalls.longest_s, 4)},
            "capacity": self.rates.as_dict(),
            "num_short_answers": self.num_short,
            "cache_hit_rate": _rounded(self.cache_hit_rate),
            "tokens_per_event": _rounded(self.tokens_per_event),
            "are_tokens_estimated": self.are_tokens_estimated,
            "is_streamed": self.is_streamed,
            "e2e_growth": _rounded(self.growth),
            "fastest_stream_tokens_per_s": _rounded(self.fastest_stream),
            "goodput": self.goodput and self.goodput.as_dict(),
            "little": self.little and self.little.as_dict(),
        }


def summarise(window: Window, slo: Slo | None = None) -> LoadSummary:
    """The figures of a run, measured against the objectives if there are any."""
    attempts = window.measured
    samples = [attempt.sample for attempt in attempts]
    good = [sample for sample in samples if sample.is_ok]
    e2e = [sample.e2e_s for sample in good]
    rates = _rates(window)
    return LoadSummary(
        num_requests=len(samples),
        num_ok=len(good),
        failures=dict(Counter(str(sample.failure) for sample in samples if sample.failure is not None).most_common()),
        ttft=Spread.of(sample.first_token_s for sample in good),
        visible=Spread.of(sample.first_visible_s for sample in good),
        itl=Spread.of(gap for sample in good for gap in sample.itl_s),
        tpot=Spread.of(sample.tpot_s for sample in good),
        e2e=Spread.of(e2e),
        e2e_with_failures=Spread.of([*e2e, *[math.inf] * (len(samples) - len(good))]),
        dispatch=Spread.of(sample.dispatch_delay_s for sample in samples),
        num_held=sum(attempt.was_held for attempt in attempts),
        stalls=Stalls.of(samples),
        rates=rates,
        prompt_tokens=Spread.of(sample.num_prompt_tokens for sample in good),
        output_tokens=Spread.of(sample.num_output_tokens for sample in good),
        prompt_asked=Spread.of(attempt.request.prompt_tokens for attempt in attempts),
        output_asked=Spread.of(attempt.request.output_tokens for attempt in attempts),
        num_short=sum(_is_short(attempt) for attempt in attempts),
        cache_hit_rate=_cache_hit_rate(good),
        tokens_per_event=mean_of(sample.tokens_per_event for sample in good),
        are_tokens_estimated=any(sample.num_output_tokens is None for sample in good),
        is_streamed=any(sample.is_streamed for sample in samples),
        growth=_growth(e2e),
        fastest_stream=max((1 / tpot for sample in good if (tpot := sample.tpot_s)), default=None),
        goodput=None if slo is None else Goodput.of(slo, samples, window),
        little=_little(window, e2e, rates),
    )


def _is_short(attempt: Attempt) -> bool:
    achieved = attempt.sample.num_output_tokens
    return attempt.sample.is_ok and achieved is not None and achieved < attempt.request.output_tokens


def _cache_hit_rate(samples: Sequence[Sample]) -> float | None:
    told = [(s.num_cached_tokens, s.num_prompt_tokens) for s in samples if s.num_cached_tokens is not None]
    total = sum(prompt or 0 for _, prompt in told)
    return sum(cached or 0 for cached, _ in told) / total if total else None


def _growth(e2e: Sequence[float]) -> float | None:
    """None for fewer than 20 requests, whose halves say nothing."""
    half = len(e2e) // 2
    return fmean(e2e[-half:]) / fmean(e2e[:half]) if half >= 10 and fmean(e2e[:half]) else None


def _little(window: Window, e2e: Sequence[float], rates: Rates) -> Little | None:
    """None if requests failed: a user who was refused waits for Retry-After, and does not think."""
    if not isinstance(window.arrivals, ClosedLoop) or not e2e or len(e2e) < len(window.measured):
        return None
    return Little(window.arrivals.users, window.mean_pause_s, fmean(e2e), rates.requests)


def _rates(window: Window) -> Rates:
    seconds = window.seconds
    if not seconds:
        return Rates(0.0, 0.0, 0.0, 0.0, 0.0)
    answered, due, prompts, output, busy = 0, window.num_cut, 0, 0.0, 0.0
    for sample in (attempt.sample for attempt in window.attempts):
        began = sample.token_times[0] if sample.token_times else sample.ended_s
        answered += sample.is_ok and window.contains(sample.ended_s)
        due += window.contains(sample.scheduled_s)
        prompts += (sample.num_prompt_tokens or 0) if window.contains(began) else 0
        output += sum(tokens for at_s, tokens in tokens_over_time(sample) if window.contains(at_s))
        busy += max(0.0, min(sample.ended_s, window.end_s) - max(sample.started_s, window.begin_s))
    return Rates(answered / seconds, due / seconds, prompts / seconds, output / seconds, busy / seconds)


def tokens_over_time(sample: Sample) -> list[tuple[float, float]]:
    """(moment, tokens) of a request.

    The server's count for each event comes first, then its usage spread evenly over the events, then one token an
    event. Without streaming all tokens come at the end.
    """
    events = sample.token_events
    if not events:
        return [(sample.ended_s, float(sample.num_output_tokens or 0))]
    if all(event.num_tokens is not None for event in events):
        return [(event.at_s, float(event.num_tokens or 0)) for event in events]
    return [(event.at_s, sample.tokens_per_event or 1.0) for event in events]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
