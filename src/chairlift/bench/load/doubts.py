"""What makes figures doubtful, each a warning with a name. Pure: figures in, warnings out.

A benchmark flatters a server if answers were in a cache, were shorter than asked for or were refused, or if the
generator waited while the queue grew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chairlift.bench.client.target import Target
from chairlift.bench.load.arrivals import OpenLoop
from chairlift.bench.load.generator import Window
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.summary import LoadSummary

UNASKED_HITS = 0.01
FAILURES = 0.01
FEW = 20
BEHIND_S = 0.05
BEHIND_SHARE = 0.05
GROWING = 1.3
CEILING_SLACK = 1.25
"""A ceiling comes from a bandwidth that was measured for tens of milliseconds, and a busy neighbour lowers it."""
LENGTH_OFF = 0.1
LITTLE_OFF = 1.33


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason not to trust a figure."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def doubts(summary: LoadSummary, window: Window, spec: RunSpec, target: Target) -> list[Doubt]:
    """Every doubt about these figures."""
    return [
        *_about_answers(summary, target),
        *_about_speed(summary, spec, target),
        *_about_the_generator(summary, spec),
        *_about_the_window(summary, window),
        *_about_counting(summary, spec),
    ]


def _about_answers(summary: LoadSummary, target: Target) -> Iterator[Doubt]:
    failed = summary.num_failed
    if summary.failure_rate > FAILURES:
        causes = ", ".join(f"{count} x {cause}" for cause, count in summary.failures.items())
        yield Doubt(
            "failures",
            f"{failed} of {summary.num_requests} requests failed ({summary.failure_rate:.0%}): {causes}. Latencies are "
            "those of the answered ones alone; a server that refuses work looks faster than it is",
        )
    if summary.num_short_answers:
        why = "" if target.can_fix_length else "; this server cannot be told to answer in exactly so many tokens"
        yield Doubt(
            "ended early",
            f"{summary.num_short_answers} of {summary.num_ok} answers have fewer tokens than asked for{why}. E2E and "
            "requests/s are those of shorter answers",
        )


def _about_speed(summary: LoadSummary, spec: RunSpec, target: Target) -> Iterator[Doubt]:
    hits, expected = summary.cache_hit_rate, spec.workload.shared_share
    if hits is not None and not spec.is_cache_wanted and hits > expected + UNASKED_HITS:
        yield Doubt(
            "warm cache",
            f"{hits:.0%} of the prompt tokens came from the server's prefix cache, of which this workload explains "
            f"{expected:.0%}. TTFT and throughput are those of prompts that were seen before",
        )
    ceiling, fastest = target.one_stream_ceiling, summary.fastest_stream_tokens_per_s
    if ceiling is not None and fastest is not None and fastest > CEILING_SLACK * ceiling:
        yield Doubt(
            "faster than memory",
            f"a stream of {fastest:.0f} tokens/s, where reading the weights for each token allows {ceiling:.0f}: "
            "something between buffers and releases in bursts, or this is not the model that it says",
        )


def _about_the_generator(summary: LoadSummary, spec: RunSpec) -> Iterator[Doubt]:
    dispatch, e2e = summary.dispatch_s, summary.e2e_s
    if summary.num_held:
        yield Doubt(
            "generator behind",
            f"{summary.num_held} requests waited here because {spec.limits.max_in_flight} were under way "
            "(--max-in-flight); their latency counts from the moment they were due",
        )
    elif dispatch is not None and dispatch.p99 > max(BEHIND_S, BEHIND_SHARE * e2e.p50 if e2e else 0.0):
        yield Doubt(
            "generator behind",
            f"requests left up to {dispatch.max:.3f} s late: this client lacks the processor to keep the schedule. Run "
            "it on another machine",
        )


def _about_the_window(summary: LoadSummary, window: Window) -> Iterator[Doubt]:
    if window.is_interrupted:
        yield Doubt("interrupted", "the run was ended early; requests under way then are not in these figures")
    if summary.num_ok < FEW:
        yield Doubt(
            "few samples",
            f"{summary.num_ok} answers are behind these percentiles: p95 and p99 are the largest value, and another "
            "run may give other ones",
        )
    if not window.warm_up.is_steady:
        yield Doubt("not steady", f"warming up ({window.warm_up.rule}) ended without the latency having settled")
    elif summary.e2e_growth is not None and not 1 / GROWING <= summary.e2e_growth <= GROWING:
        is_growing = isinstance(window.arrivals, OpenLoop) and summary.e2e_growth > 1
        yield Doubt(
            "not steady",
            f"E2E of the later half of the requests was {summary.e2e_growth:.2f} x that of the earlier half: the "
            "figures depend on how long was measured" + ("; the queue grows" if is_growing else ""),
        )
    if window.num_cut and not window.is_interrupted:
        yield Doubt("cut", f"{window.num_cut} requests were given up at the end: throughput is at least what is said")
    little = summary.little
    if little is not None and summary.num_ok >= FEW and not 1 / LITTLE_OFF <= little.ratio <= LITTLE_OFF:
        yield Doubt(
            "Little's law",
            f"{little.measured_requests_per_s:.2f} requests/s were answered where users / (think + latency) gives "
            f"{little.expected_requests_per_s:.2f}: the window is too short, or not steady",
        )


def _about_counting(summary: LoadSummary, spec: RunSpec) -> Iterator[Doubt]:
    if summary.are_tokens_estimated:
        yield Doubt(
            "tokens estimated",
            "the server did not count the tokens of every answer: there, each piece of the stream is taken for one",
        )
    if summary.tokens_per_event is not None and summary.tokens_per_event > 1.05:
        yield Doubt(
            "several tokens a piece",
            f"a piece of the stream holds {summary.tokens_per_event:.1f} tokens: ITL is the gap between pieces, TPOT "
            "the time per token",
        )
    achieved = summary.prompt_tokens
    if spec.workload.trace:
        return
    if achieved is None:
        if summary.num_ok:
            yield Doubt("lengths unknown", "the server does not count prompt tokens: their length is a guess")
    elif summary.prompt_asked and abs(achieved.mean / summary.prompt_asked.mean - 1) > LENGTH_OFF:
        yield Doubt(
            "lengths missed",
            f"prompts have {achieved.mean:.0f} tokens by the server's count, where {summary.prompt_asked.mean:.0f} "
            "were asked for",
        )


def grouped(found: Sequence[tuple[str, Doubt]], what: str) -> list[str]:
    """The doubts of several runs, each name once, from pairs (run, doubt): "name (what 1, 2): text of the first"."""
    where: dict[str, list[str]] = {}
    first: dict[str, Doubt] = {}
    for run, doubt in found:
        first.setdefault(doubt.name, doubt)
        where.setdefault(doubt.name, []).append(run)
    return [f"{name} ({what} {', '.join(where[name])}): {doubt.text}" for name, doubt in first.items()]
