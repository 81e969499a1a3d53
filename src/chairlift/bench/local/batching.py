"""`chairlift bench batching`: the same mixed load under serial, static and continuous batching, on this machine.

    first  ██                                                     a short answer that is running already
    long     ████████████████████████████████████████████████████  one answer of 1,200 tokens
    short    ██                                                    four of one line, at the same time
    late           ██      ██      ██                              one line each, while the long one is written

Each policy has a server of its own. Queue and prefill come from the engine's log (its clock, of which only durations
are used). The other moments come from the client: decode ends with the last token that arrived, held is from there to
the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from chairlift.bench.client.client import Client
from chairlift.bench.client.connect import discover
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import GenerationRequest, Target
from chairlift.bench.local.server import LocalServer, ObservedRequest, TimedRequest, serving
from chairlift.bench.report.measure import ProgressDisplay, machine_note
from chairlift.bench.report.report import Cell, Chart, Lane, Report, Series, Span, Table, columns

POLICIES = ("serial", "static", "continuous")
SIZES = (1, 2, 4, 8)
TOGETHER_S = 0.03
"""Seconds after the first, which is running then."""
HELD_S = 0.05
"""A shorter time between the last token and the end is the network's."""
_STORY = "Tell me a long story about a mountain village, its people and its first chairlift."
_LINES = (
    "Name the capital of France in one line.",
    "What is seven times eight? One line, please.",
    "Give me one word that rhymes with snow.",
    "Say hello in Spanish, in one line.",
    "Which sea lies between Europe and Africa?",
    "Name one metal that is liquid at room temperature.",
    "How many legs has a spider? Answer briefly.",
)


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """The load that every policy gets."""

    long_tokens: int = 1200
    short_tokens: int = 24
    num_short: int = 4
    num_late: int = 3
    late_every_s: float = 1.0

    def requests(self) -> list[TimedRequest]:
        """The requests in order of arrival.

        The long one and the short ones come while the first is served, so that a static batch takes them together. The
        long one comes just ahead of them.
        """
        requests = [
            TimedRequest("first", "Good morning! Who are you?", self.short_tokens, 0.0),
            TimedRequest("long", _STORY, self.long_tokens, TOGETHER_S),
        ]
        moments = [TOGETHER_S + 0.02] * self.num_short + [(i + 1) * self.late_every_s for i in range(self.num_late)]
        for i, at_s in enumerate(moments):
            kind = "short" if i < self.num_short else "late"
            place = i + 1 if i < self.num_short else i + 1 - self.num_short
            prompt = f"{_LINES[i % len(_LINES)]} ({i})"
            requests.append(TimedRequest(f"{kind} {place}", prompt, self.short_tokens, at_s))
        return requests

    def __str__(self) -> str:
        return (
            f"one answer of {self.long_tokens:,} tokens, {1 + self.num_short} of {self.short_tokens} with it, "
            f"{self.num_late} more of {self.short_tokens} while it is written"
        )


def written_s(observed: ObservedRequest, *, can_be_held: bool) -> float:
    """When decoding was over. `can_be_held`: the policy may hold the end back, and with it the last token's text."""
    sample = observed.sample
    times, end_s = sample.token_times, sample.ended_s
    before = [at_s for at_s in times if at_s < end_s - HELD_S]
    usual_s = median(sample.itl_s) if sample.itl_s else 0.0
    if can_be_held and before and end_s - before[-1] > 4 * usual_s:
        return before[-1]
    return times[-1] if times else end_s


def held_s(observed: ObservedRequest, *, can_be_held: bool) -> float:
    """Seconds from the end of decoding to the end of the answer at the client."""
    return observed.sample.ended_s - written_s(observed, can_be_held=can_be_held) if can_be_held else 0.0


def lane(observed: ObservedRequest, *, can_be_held: bool) -> Lane:
    """The row of a request in the timeline."""
    name, sample, times = observed.request.name, observed.sample, observed.sample.token_times
    if not times:
        return Lane(name, [Span("failed", sample.scheduled_s, sample.ended_s)])
    first, last = times[0], max(times[0], written_s(observed, can_be_held=can_be_held))
    begun = min(first, sample.started_s + observed.logged.queue_s) if observed.logged else sample.started_s
    spans = [
        Span("queued", sample.scheduled_s, begun),
        Span("prefill", begun, first),
        Span("decode", first, last),
        Span("held", last, last + held_s(observed, can_be_held=can_be_held)),
    ]
    return Lane(name, [span for span in spans if span.end_s > span.start_s])


@dataclass
class PolicyRun:
    """The requests of one policy; `slots` is None for the server's own choice."""

    policy: str
    slots: int | None
    requests: list[ObservedRequest] = field(default_factory=list)

    @property
    def can_hold(self) -> bool:
        """Whether the policy holds the end of an answer back."""
        return self.policy == "static"

    @property
    def answered(self) -> list[Sample]:
        """The samples with a complete answer."""
        return [each.sample for each in self.requests if each.sample.is_ok]

    @property
    def ttft_s(self) -> list[float]:
        """TTFT at the client, of the answered requests."""
        return [value for sample in self.answered if (value := sample.first_token_s) is not None]

    def e2e_s(self, *, is_long: bool) -> list[float]:
        """E2E of the answered requests: of the long one, or of the others."""
        named = [each for each in self.requests if (each.request.name == "long") == is_long]
        return [each.sample.e2e_s for each in named if each.sample.is_ok]

    @property
    def queue_s(self) -> list[float]:
        """Waits for a slot, by the engine."""
        return [each.logged.queue_s for each in self.requests if each.logged]

    @property
    def held_s(self) -> list[float]:
        """How long the policy held the end of each answer back."""
        return [held_s(each, can_be_held=self.can_hold) for each in self.requests]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "policy": self.policy,
            "slots": self.slots,
            "requests": [
                {
                    "name": each.request.name,
                    "at_s": each.sample.scheduled_s,
                    "failure": each.sample.failure,
                    "ttft_s": each.sample.first_token_s,
                    "e2e_s": each.sample.e2e_s,
                    "queue_s": each.logged and each.logged.queue_s,
                    "prefill_s": each.logged and each.logged.prefill_s,
                    "held_s": held,
                    "output_tokens": each.sample.num_output_tokens,
                }
                for each, held in zip(self.requests, self.held_s, strict=True)
            ],
        }


async def run_load(server: LocalServer, load: MixedLoad, run: PolicyRun) -> None:
    """Sends the load to a server. `run` has each request as soon as it has ended."""
    async with Client(Target(server.url)) as client:
        target = await discover(client)
        await client.ask(GenerationRequest(_LINES[0], 8))  # the first request pays for what is done once

    async def observe(index: int, request: TimedRequest) -> None:
        run.requests.append(await server.observe(client, request, f"{run.policy}-{index}", index=index))

    async with Client(target) as client, asyncio.TaskGroup() as group:
        for index, request in enumerate(load.requests()):
            group.create_task(observe(index, request))
    run.requests.sort(key=lambda each: each.sample.index)


class BatchingCommand:
    """The command: `work` measures, `report` says what was measured so far."""

    def __init__(self, model: str | None, load: MixedLoad, sizes: Sequence[int], flags: Sequence[str] = ()) -> None:
        self.load = load
        self.runs: list[PolicyRun] = []
        self._model = model
        self._flags = tuple(flags)
        self._plan = [(policy, None) for policy in POLICIES] + [("static", size) for size in sizes]

    async def work(self, progress: ProgressDisplay) -> None:
        """One server after the other."""
        for done, (policy, slots) in enumerate(self._plan):
            what = policy if slots is None else f"{policy}, batches of {slots}"
            progress.say(f"{what}: starting a server")
            progress.at(done, len(self._plan), what)
            flags = ["--batching", policy, "--max-queue", "1000"]  # so that no request is refused
            flags += [] if slots is None else ["--max-num-seqs", str(slots)]
            async with serving(self._model, *self._flags, *flags) as server:
                run = PolicyRun(policy, slots)
                self.runs.append(run)
                await run_load(server, self.load, run)

    def report(self) -> Report:
        """What was measured so far."""
        by_policy = [run for run in self.runs if run.slots is None and run.answered]
        by_size = [run for run in self.runs if run.slots is not None and run.answered]
        failed = sum(len(run.requests) - len(run.answered) for run in self.runs)
        tables = [_policy_table(by_policy)] if by_policy else []
        tables += [_size_table(by_size)] if by_size else []
        note = "So few requests have no percentiles worth the name: the tail is the slowest of them."
        return Report(
            "bench batching",
            f"Serial, static and continuous batching: {self.load}",
            tables=tables,
            verdict=_verdict({run.policy: run for run in by_policy}),
            warnings=[f"{failed} requests failed; the figures are of the others"] if failed else [],
            notes=[note, machine_note(None)],
            data={"load": asdict(self.load), "runs": [run.as_dict() for run in self.runs]},
            charts=_charts(by_policy, by_size),
        )


_WAITS = ("TTFT, median|s", "TTFT, slowest|s", "short answer E2E, median|s", "short answer E2E, slowest|s")


def _policy_table(runs: Sequence[PolicyRun]) -> Table:
    heads = columns(
        "<policy", *_WAITS, "long answer E2E|s", "longest in queue|s", "longest held|s", "output while all ran|tokens/s"
    )
    rows: list[list[Cell]] = []
    for run in runs:
        long_s = _most(run.e2e_s(is_long=True))
        rows.append([run.policy, *_waits(run), long_s, _most(run.queue_s), _most(run.held_s), _rate(run)])
    note = "Held: the answer is written, and its end waits for the batch. tokens/s is capacity; nobody feels it."
    return Table("By policy", heads, rows, note)


def _size_table(runs: Sequence[PolicyRun]) -> Table:
    rows = [(run.slots, *_waits(run), _most(run.queue_s)) for run in runs]
    note = "Who is in the first batch has its first token soon; who is not waits until its slowest member has ended."
    heads = columns("batch of at most", *_WAITS, "longest in queue|s")
    return Table("Static batching by size of the batch", heads, rows, note)


def _waits(run: PolicyRun) -> tuple[float, ...]:
    """The cells of _WAITS."""
    return tuple(of(values) for values in (run.ttft_s, run.e2e_s(is_long=False)) for of in (_middle, _most))


def _verdict(runs: dict[str, PolicyRun]) -> list[str]:
    """What the policies change, if both of a pair were measured."""
    said: list[str] = []
    best = runs.get("continuous")
    if best is None or not best.ttft_s:
        return said
    for policy in ("serial", "static"):
        other = runs.get(policy)
        if other is not None and other.ttft_s:
            said.append(
                f"The slowest first token comes after {_most(other.ttft_s):.2f} s with {policy} and "
                f"{_most(best.ttft_s):.2f} s with continuous batching; the median after {_middle(other.ttft_s):.2f} s "
                f"and {_middle(best.ttft_s):.2f} s."
            )
    alone, shared = (
        _most(runs[policy].e2e_s(is_long=True)) if policy in runs else 0.0 for policy in ("serial", "continuous")
    )
    if alone > 0 and shared > 0:
        said.append(f"The long answer itself takes {alone:.2f} s in its turn (serial), {shared:.2f} s in company.")
    return said


def _charts(by_policy: Sequence[PolicyRun], by_size: Sequence[PolicyRun]) -> list[Chart]:
    charts = [
        Chart(
            "timeline",
            f"{run.policy}: one row a request",
            "time since the first request, s",
            "",
            lanes=[lane(each, can_be_held=run.can_hold) for each in run.requests],
        )
        for run in by_policy
    ]
    if by_size:
        sizes = [float(run.slots or 0) for run in by_size]
        lines = [
            Series("median", sizes, [_middle(run.ttft_s) for run in by_size]),
            Series("slowest", sizes, [_most(run.ttft_s) for run in by_size]),
        ]
        title = "Static batching: TTFT over the size of the batch"
        charts.append(Chart("lines", title, "requests in a batch, at most", "TTFT, s", lines))
    return charts


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _most(values: Iterable[float]) -> float:
    return max(values, default=math.nan)


def _rate(run: PolicyRun) -> float:
    tokens = sum(sample.num_output_tokens or 0 for sample in run.answered)
    return tokens / max(sample.ended_s for sample in run.answered)
