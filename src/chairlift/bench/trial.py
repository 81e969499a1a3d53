"""One server under one load: finds out how it counts, runs the generator, and puts the figures beside their ceilings.

    connect ── calibrate (two requests: how long is a prompt?) ── scout (one: how long is an answer?) ── run ── outcome

What the engine says of itself (/metrics) is read when the window begins and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from chairlift.bench import live, probe
from chairlift.bench.checks import Circumstances, Doubt, doubts
from chairlift.bench.client import BenchError, Client, Target, connect
from chairlift.bench.load import Generator, Phase, Window
from chairlift.bench.options import Wanted
from chairlift.bench.sample import Sample
from chairlift.bench.stats import Slo, Summary, summarise
from chairlift.bench.workload import Closed, Gauge, Job

GAUGE_WORDS = (8, 72)


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that can be asked, and what it says of itself."""

    client: Client

    @property
    def target(self) -> Target:
        """How it is asked."""
        return self.client.target

    @property
    def ceiling(self) -> float | None:
        """As the client knows it."""
        return self.client.ceiling

    @property
    def slots(self) -> float:
        """Requests that run at once; infinite where not told."""
        limits = self.client.card.get("limits")
        told = limits.get("max_num_seqs") if isinstance(limits, dict) else None
        return float(told) if isinstance(told, int) else math.inf

    def output_ceiling(self, in_flight: float) -> float | None:
        """Tokens/s of all streams together, each at the ceiling of one; those that wait for a slot have none."""
        return None if self.ceiling is None else self.ceiling * min(in_flight, self.slots)

    @property
    def name(self) -> str:
        """For titles."""
        return f"{self.target.model} on {self.target.base} ({self.target.kind})"


@asynccontextmanager
async def meet(shared: live.Shared, url: str) -> AsyncIterator[Subject]:
    """Opens a client and finds out who answers. Raises BenchError when nobody does."""
    async with connect(url, shared) as client:
        yield Subject(client)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave, finished or not."""

    subject: Subject
    wanted: Wanted
    window: Window
    summary: Summary
    engine: probe.Engine | None
    doubts: tuple[Doubt, ...]

    @property
    def queue(self) -> probe.Mean | None:
        """Waits for a slot, by the engine's own clock; None where it does not export them."""
        return self.engine.queue if self.engine else None

    @property
    def queue_s(self) -> float | None:
        """Mean wait for a slot."""
        return self.queue.mean_s if self.queue else None

    def _queue_bounds(self) -> dict[str, float | None] | None:
        """What that part of the waits did not exceed: bounds of buckets; null beyond the last."""
        if self.queue is None:
            return None
        bounds = {
            name: self.queue.bound_s(percent) for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))
        }
        return {name: bound if bound is not None and math.isfinite(bound) else None for name, bound in bounds.items()}

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        engine, limits = self.engine, self.wanted.limits
        return {
            "url": self.subject.target.base,
            "model": self.subject.target.model,
            "server": str(self.subject.target.kind),
            "api": str(self.subject.target.api),
            "load": str(self.wanted.arrivals),
            "work": self.wanted.workload.describe(),
            "window_s": round(self.window.seconds, 4),
            "warm_up": {
                "num_requests": self.window.warm_up.num_requests,
                "is_steady": self.window.warm_up.is_steady,
                "rule": self.window.warm_up.rule,
            },
            "max_in_flight": limits.max_in_flight,
            "num_cut": self.window.num_cut,
            **self.summary.as_dict(),
            "engine_queue_mean_s": self.queue_s,
            "engine_queue_bounds_s": self._queue_bounds(),
            "num_preemptions": engine.num_preemptions if engine else None,
            "one_stream_ceiling_tokens_per_s": self.subject.ceiling,
            "doubts": [{"name": doubt.name, "text": doubt.text} for doubt in self.doubts],
        }


class Trial:
    """One run. `outcome` is there as soon as the load has begun, and grows."""

    def __init__(self, subject: Subject, wanted: Wanted, progress: live.Live, label: str = "") -> None:
        self._subject, self._wanted, self._progress, self._label = subject, wanted, progress, label
        self._generator: Generator | None = None
        self._readings: dict[Phase, asyncio.Task[probe.Reading]] = {}
        self._engine: probe.Engine | None = None

    async def run(self) -> None:
        """Raises BenchError when the server answers nothing at all."""
        client = self._subject.client
        gauge = await calibrate(client, self._wanted)
        self._wanted = replace(self._wanted, workload=self._wanted.workload.calibrated(gauge))
        await self._scout()
        self._generator = Generator(
            self._wanted.workload,
            self._wanted.arrivals,
            self._ask,
            now=client.clock.now_s,
            limits=self._wanted.limits,
            watch=self._watch,
        )
        try:
            await self._generator.run()
        finally:
            with contextlib.suppress(BenchError, asyncio.CancelledError):
                self._engine = await self._engine_figures()

    async def _scout(self) -> None:
        """How long an answer takes, so that the users of a closed loop do not all begin at once."""
        arrivals = self._wanted.arrivals
        if not isinstance(arrivals, Closed) or arrivals.users == 1 or self._wanted.workload.trace:
            return
        self._progress.at(0, None, f"{self._label}scouting")
        workload = replace(self._wanted.workload, salt=self._wanted.workload.salt + "/scout")
        seen = await self._ask(workload.job(0), None)
        spread_s = arrivals.think_s + seen.service_s
        self._wanted = replace(self._wanted, limits=replace(self._wanted.limits, spread_s=spread_s))

    async def _ask(self, job: Job, due_s: float | None) -> Sample:
        return await self._subject.client.ask(
            job.prompt, job.output_tokens, is_streamed=self._wanted.is_streamed, index=job.index, scheduled_s=due_s
        )

    def _watch(self, phase: Phase, done: int, total: int | None, in_flight: int) -> None:
        if phase is not Phase.WARM_UP and phase not in self._readings:
            self._readings[phase] = asyncio.create_task(probe.read(self._subject.client))
        self._progress.at(done, total, f"{self._label}{phase}, {in_flight} in flight")

    async def _engine_figures(self) -> probe.Engine | None:
        """Of the window alone: what the tail waited for is no part of it."""
        if Phase.WINDOW not in self._readings:
            return None
        before = await self._readings[Phase.WINDOW]
        ended = self._readings.get(Phase.TAIL)
        after = await (probe.read(self._subject.client) if ended is None else ended)
        return probe.between(before, after) if after.values else None

    @property
    def outcome(self) -> Outcome | None:
        """What there is so far; None before the load has begun."""
        if self._generator is None:
            return None
        window, slo = self._generator.window, self._wanted.slo
        summary = _with_hits(summarise(window, slo), self._engine)
        around = Circumstances(
            workload=self._wanted.workload,
            is_cache_wanted=self._wanted.is_cache_wanted,
            can_fix_length=self._subject.target.can_fix_length,
            one_stream_ceiling=self._subject.ceiling,
        )
        found = tuple(doubts(summary, window, around))
        return Outcome(self._subject, self._wanted, window, summary, self._engine, found)


def _with_hits(summary: Summary, engine: probe.Engine | None) -> Summary:
    """The hit rate by /metrics, where usage does not tell it."""
    if summary.cache_hit_rate is not None or engine is None:
        return summary
    return replace(summary, cache_hit_rate=engine.hit_rate)


async def calibrate(client: Client, wanted: Wanted) -> Gauge:
    """How many tokens the server counts for a word, from two short requests. Raises BenchError when one fails."""
    counted = []
    for num_words in GAUGE_WORDS:
        sample = await client.ask(wanted.workload.text(f"gauge {num_words}", num_words), 1)
        if sample.failure is not None:
            raise BenchError(
                f"{client.target.base}: the first request failed ({sample.failure}): {sample.failure_detail}",
                hint="--model, --api and --api-key decide what is asked",
            )
        counted.append((num_words, sample.num_prompt_tokens))
    return Gauge.fit(*counted)


def slo_text(slo: Slo) -> str:
    """As it was typed."""
    return ", ".join(f"{name} <= {limit:g} s" for name, limit in slo.as_dict().items())
