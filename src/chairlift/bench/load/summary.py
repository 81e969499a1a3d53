"""The figures of one run: pure functions from samples to figures. Times in seconds, rates per second.

Latencies are those of the *measured* requests that were answered. Throughput is what arrived within the window, of
every request that was in flight: those that began before the window or ended after it worked in it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from chairlift.bench.client.sample import Failure, Sample
from chairlift.bench.load.arrivals import ClosedLoop
from chairlift.bench.load.generator import Window
from chairlift.bench.load.goodput import Goodput, Slo
from chairlift.bench.report.stats import Spread, as_figures, mean_of

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
    mean_think_s: float
    mean_latency_s: float
    measured_requests_per_s: float

    @property
    def expected_requests_per_s(self) -> float:
        """users / (think + latency)."""
        turn_s = self.mean_think_s + self.mean_latency_s
        return self.users / turn_s if turn_s else 0.0

    @property
    def ratio(self) -> float:
        """Measured / expected, near 1 in a steady window."""
        expected = self.expected_requests_per_s
        return self.measured_requests_per_s / expected if expected else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return as_figures(self, "expected_requests_per_s", "ratio")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens and requests per second of the window, of all requests together."""

    requests_per_s: float = 0.0  # answered requests
    due_per_s: float = 0.0  # requests that fell due in the window, and those that were given up at its end
    prompt_tokens_per_s: float = 0.0  # tokens of prompts whose answer began in the window, cached ones included
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    mean_in_flight: float = 0.0  # mean number of requests between dispatch and end


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """All figures of one run against one server."""

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    ttft_s: Spread | None
    visible_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    e2e_with_failures_s: Spread | None  # A failed request counts as an infinite time
    dispatch_s: Spread | None
    num_held: int
    stalls: Stalls
    capacity: Capacity
    prompt_tokens: Spread | None
    prompt_asked: Spread | None
    output_tokens: Spread | None
    output_asked: Spread | None
    num_short_answers: int  # answers that have fewer tokens than were asked for, by usage
    cache_hit_rate: float | None  # share of the prompt tokens, by usage; None if the server tells none
    tokens_per_event: float | None
    are_tokens_estimated: bool
    is_streamed: bool
    e2e_growth: float | None  # mean E2E of the later half of the requests / that of the earlier half
    fastest_stream_tokens_per_s: float | None  # from its first token to its last
    goodput: Goodput | None
    little: Little | None

    @property
    def num_failed(self) -> int:
        """Measured requests without a complete answer."""
        return self.num_requests - self.num_ok

    @property
    def failure_rate(self) -> float:
        """Share of the measured requests."""
        return self.num_failed / self.num_requests if self.num_requests else 0.0

    @property
    def num_503(self) -> int:
        """Requests that the server refused since it was full."""
        return self.failures.get(str(Failure.HTTP_503), 0)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return as_figures(self, "num_failed", "failure_rate", "num_503")


def summarise(window: Window, slo: Slo | None = None) -> LoadSummary:
    """The figures of a run, measured against the objectives if there are any."""
    attempts = window.measured
    samples = [attempt.sample for attempt in attempts]
    good = [sample for sample in samples if sample.is_ok]
    e2e = [sample.e2e_s for sample in good]
    capacity = _capacity(window)
    return LoadSummary(
        num_requests=len(samples),
        num_ok=len(good),
        failures=dict(Counter(str(sample.failure) for sample in samples if sample.failure is not None).most_common()),
        ttft_s=Spread.of(sample.first_token_s for sample in good),
        visible_s=Spread.of(sample.first_visible_s for sample in good),
        itl_s=Spread.of(gap for sample in good for gap in sample.itl_s),
        tpot_s=Spread.of(sample.tpot_s for sample in good),
        e2e_s=Spread.of(e2e),
        e2e_with_failures_s=Spread.of([*e2e, *[math.inf] * (len(samples) - len(good))]),
        dispatch_s=Spread.of(sample.dispatch_delay_s for sample in samples),
        num_held=sum(attempt.was_held for attempt in attempts),
        stalls=Stalls.of(samples),
        capacity=capacity,
        prompt_tokens=Spread.of(sample.num_prompt_tokens for sample in good),
        output_tokens=Spread.of(sample.num_output_tokens for sample in good),
        prompt_asked=Spread.of(attempt.request.prompt_tokens for attempt in attempts),
        output_asked=Spread.of(attempt.request.output_tokens for attempt in attempts),
        num_short_answers=sum(
            sample.num_output_tokens is not None and sample.num_output_tokens < attempt.request.output_tokens
            for attempt in attempts
            if (sample := attempt.sample).is_ok
        ),
        cache_hit_rate=_cache_hit_rate(good),
        tokens_per_event=mean_of(sample.tokens_per_event for sample in good),
        are_tokens_estimated=any(sample.num_output_tokens is None for sample in good),
        is_streamed=any(sample.is_streamed for sample in samples),
        e2e_growth=_growth(e2e),
        fastest_stream_tokens_per_s=max((1 / tpot for sample in good if (tpot := sample.tpot_s)), default=None),
        goodput=None if slo is None else Goodput.of(slo, samples, window),
        little=_little(window, e2e, capacity),
    )


def _cache_hit_rate(samples: Sequence[Sample]) -> float | None:
    counted = [(s.num_cached_tokens, s.num_prompt_tokens) for s in samples if s.num_cached_tokens is not None]
    total = sum(prompt or 0 for _, prompt in counted)
    return sum(cached or 0 for cached, _ in counted) / total if total else None


def _growth(e2e: Sequence[float]) -> float | None:
    """None for fewer than 20 requests, whose halves say nothing."""
    half = len(e2e) // 2
    return fmean(e2e[-half:]) / fmean(e2e[:half]) if half >= 10 and fmean(e2e[:half]) else None


def _little(window: Window, e2e: Sequence[float], capacity: Capacity) -> Little | None:
    """None if requests failed: a user who was refused waits for Retry-After, and does not think."""
    if not isinstance(window.arrivals, ClosedLoop) or not e2e or len(e2e) < len(window.measured):
        return None
    return Little(window.arrivals.users, window.mean_pause_s, fmean(e2e), capacity.requests_per_s)


def _capacity(window: Window) -> Capacity:
    seconds = window.seconds
    if not seconds:
        return Capacity()
    answered, due, prompts, output, busy = 0, window.num_cut, 0, 0.0, 0.0
    for sample in (attempt.sample for attempt in window.attempts):
        began = sample.token_times[0] if sample.token_times else sample.ended_s
        answered += sample.is_ok and window.contains(sample.ended_s)
        due += window.contains(sample.scheduled_s)
        prompts += (sample.num_prompt_tokens or 0) if window.contains(began) else 0
        output += sum(tokens for at_s, tokens in tokens_over_time(sample) if window.contains(at_s))
        busy += max(0.0, min(sample.ended_s, window.end_s) - max(sample.started_s, window.begin_s))
    return Capacity(*(total / seconds for total in (answered, due, prompts, output, prompts + output, busy)))


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
