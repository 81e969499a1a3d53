"""Servers under load: measures how each counts tokens, runs the generator, and collects the figures.

    connect ── calibrate (two requests: how long is a prompt?) ── probe (one: how long is an answer?) ── run ── result

The engine's own figures (/metrics) are read when the window begins and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from chairlift.bench.client import engine_metrics
from chairlift.bench.client.client import BenchError, Client
from chairlift.bench.client.connect import connect
from chairlift.bench.client.engine_metrics import EngineMetrics, Histogram, MetricsSnapshot
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import ConnectOptions, GenerationRequest, Target
from chairlift.bench.load.arrivals import ClosedLoop
from chairlift.bench.load.doubts import Doubt, doubts
from chairlift.bench.load.generator import LoadGenerator, Phase, Window
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.summary import LoadSummary, summarise
from chairlift.bench.load.workload import PlannedRequest, TokenCalibration
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Report

CALIBRATION_WORDS = (8, 72)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The figures of one run, finished or not."""

    target: Target
    spec: RunSpec
    window: Window
    summary: LoadSummary
    engine: EngineMetrics | None
    doubts: tuple[Doubt, ...]

    @property
    def queue(self) -> Histogram | None:
        """Waits for a slot, by the engine's own clock; None if it does not export them."""
        return self.engine.queue if self.engine else None

    @property
    def queue_s(self) -> float | None:
        """Mean wait for a slot; None if the engine does not export it."""
        return self.queue.mean_s if self.queue else None

    @property
    def stream_rate(self) -> float | None:
        """Tokens/s of the median stream; None if not known."""
        tpot = self.summary.tpot_s
        return None if tpot is None or not tpot.p50 else 1 / tpot.p50

    def notes(self) -> list[str]:
        """What is needed to repeat the run."""
        warm_up, workload = self.window.warm_up, self.spec.workload
        lengths = f"prompts of {workload.prompt} tokens, answers of {workload.output}"
        if workload.trace:
            lengths = f"a trace of {len(workload.trace)} requests"
        return [
            f"Load: {self.spec.arrivals}; {lengths}; seed {workload.seed}, salt {workload.salt or 'none'}.",
            f"Warm-up: {warm_up.num_requests} requests, {warm_up.rule}; no pause before the window of "
            f"{self.window.seconds:.1f} s. Latencies are of the requests due in it, tokens/s of all that arrived in "
            "it.",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON. A percentile of the queue waits is the bound of its bucket, infinite beyond the last."""
        percents = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
        bounds = self.queue and {name: self.queue.bound_s(percent) for name, percent in percents.items()}
        return {
            "url": self.target.base,
            "model": self.target.model,
            "server": str(self.target.kind),
            "api": str(self.target.api),
            "load": str(self.spec.arrivals),
            "work": self.spec.workload.describe(),
            "window_s": round(self.window.seconds, 4),
            "warm_up": asdict(self.window.warm_up),
            "max_in_flight": self.spec.limits.max_in_flight,
            "num_cut": self.window.num_cut,
            **self.summary.as_dict(),
            "engine_queue_mean_s": self.queue_s,
            "engine_queue_bounds_s": bounds,
            "num_preemptions": self.engine.num_preemptions if self.engine else None,
            "one_stream_ceiling_tokens_per_s": self.target.one_stream_ceiling,
            "doubts": [asdict(doubt) for doubt in self.doubts],
        }


class LoadRun:
    """One run against one server. `result` exists as soon as the load has begun, and grows."""

    def __init__(self, client: Client, spec: RunSpec, progress: ProgressDisplay, label: str = "") -> None:
        self._client, self._spec, self._progress, self._label = client, spec, progress, label
        self._generator: LoadGenerator | None = None
        self._snapshots: dict[Phase, asyncio.Task[MetricsSnapshot]] = {}
        self._engine: EngineMetrics | None = None

    async def run(self) -> None:
        """Raises BenchError if the first requests fail."""
        calibration = await calibrate(self._client, self._spec)
        self._spec = replace(self._spec, workload=replace(self._spec.workload, calibration=calibration))
        await self._spread_users()
        self._generator = LoadGenerator(
            self._spec.workload,
            self._spec.arrivals,
            self._send,
            now=self._client.clock.now_s,
            limits=self._spec.limits,
            on_progress=self._on_progress,
        )
        try:
            await self._generator.run()
        finally:
            with contextlib.suppress(BenchError, asyncio.CancelledError):
                self._engine = await self._engine_figures()

    async def _spread_users(self) -> None:
        """Measures one answer. The users of a closed loop begin over that time, instead of all at once."""
        arrivals = self._spec.arrivals
        if not isinstance(arrivals, ClosedLoop) or arrivals.users == 1 or self._spec.workload.trace:
            return
        self._progress.at(0, None, f"{self._label}{arrivals}: asking once")
        workload = replace(self._spec.workload, salt=self._spec.workload.salt + "/probe")
        sample = await self._send(workload.request(0), None)
        spread_s = arrivals.think_s + sample.ended_s - sample.started_s
        self._spec = replace(self._spec, limits=replace(self._spec.limits, spread_s=spread_s))

    async def _send(self, planned: PlannedRequest, due_s: float | None) -> Sample:
        request = GenerationRequest(planned.prompt, planned.output_tokens, is_streamed=self._spec.is_streamed)
        return await self._client.ask(request, index=planned.index, scheduled_s=due_s)

    def _on_progress(self, phase: Phase, done: int, total: int | None, in_flight: int) -> None:
        if phase is not Phase.WARM_UP and phase not in self._snapshots:
            self._snapshots[phase] = asyncio.create_task(engine_metrics.scrape(self._client))
        self._progress.at(done, total, f"{self._label}{self._spec.arrivals}: {phase}, {in_flight} in flight")

    async def _engine_figures(self) -> EngineMetrics | None:
        """The engine's figures of the window; those of the tail do not count."""
        if Phase.WINDOW not in self._snapshots:
            return None
        before = await self._snapshots[Phase.WINDOW]
        ended = self._snapshots.get(Phase.TAIL)
        after = await (engine_metrics.scrape(self._client) if ended is None else ended)
        return engine_metrics.difference(before, after) if after.values else None

    @property
    def result(self) -> LoadResult | None:
        """What was measured so far; None before the load has begun."""
        if self._generator is None:
            return None
        window, target = self._generator.window, self._client.target
        summary = summarise(window, self._spec.slo)
        if summary.cache_hit_rate is None and self._engine is not None:  # usage does not tell it
            summary = replace(summary, cache_hit_rate=self._engine.hit_rate)
        found = tuple(doubts(summary, window, self._spec, target))
        return LoadResult(target, self._spec, window, summary, self._engine, found)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a command: the number of its server, its load, and a label for the progress display."""

    server: int
    spec: RunSpec
    label: str = ""


@dataclass
class LoadCommand:
    """A command that puts load on servers: its runs one after the other, and the report on those so far."""

    urls: Sequence[str]
    options: ConnectOptions
    plan: Sequence[PlannedRun]
    tell: Callable[[Sequence[LoadResult | None]], Report]
    """Makes the report of the results, in the order of the plan; None for a run that has not begun."""
    runs: list[LoadRun] = field(default_factory=list)

    async def work(self, progress: ProgressDisplay) -> None:
        """All runs of the plan."""
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(url, self.options)) for url in self.urls]
            for planned in self.plan:
                client = clients[planned.server]
                progress.say(f"{planned.label}{client.target.name}: {planned.spec.arrivals}")
                self.runs.append(LoadRun(client, planned.spec, progress, planned.label))
                await self.runs[-1].run()

    def report(self) -> Report:
        """Every run that has begun."""
        missing = len(self.plan) - len(self.runs)
        return self.tell([*(run.result for run in self.runs), *[None] * missing])


async def calibrate(client: Client, spec: RunSpec) -> TokenCalibration:
    """How many tokens the server counts for a word, from two short requests. Raises BenchError if one fails."""
    counted = []
    for num_words in CALIBRATION_WORDS:
        prompt = spec.workload.text(f"calibration {num_words}", num_words)
        sample = await client.ask(GenerationRequest(prompt, 1))
        if sample.failure is not None:
            raise BenchError(
                f"{client.target.base}: the first request failed ({sample.failure}): {sample.failure_detail}",
                hint="--model, --api and --api-key decide what is asked",
            )
        counted.append((num_words, sample.num_prompt_tokens))
    return TokenCalibration.fit(*counted)
