"""Engines with known answers for the load generator, in virtual time: without sockets, and with seeded chance only.

An engine is a `SendRequest`: (request, when it was due) -> Sample. Its samples are what a client would have seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from chairlift.bench.client.sample import Event, EventKind, Failure, Sample
from chairlift.bench.load.arrivals import Arrivals
from chairlift.bench.load.generator import LoadGenerator, RunLimits, Window
from chairlift.bench.load.workload import Lengths, PlannedRequest, Workload

WORK = Workload(Lengths("fixed", 20), Lengths("fixed", 5))


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class VirtualEngine:
    """Answers after `first_s`, then a token every `gap_s`; `slots` requests at once, the others wait in order."""

    first_s: float = 0.5
    gap_s: float = 0.0
    slots: int = 1_000_000
    fate: Callable[[int], Failure | None] = lambda _: None
    """Number of the request in order of arrival -> how it fails."""
    num_tokens: Callable[[PlannedRequest], int] = lambda request: request.output_tokens
    num_cached: int | None = None
    retry_after_s: float | None = None
    pace: Callable[[int], float] = lambda _: 1.0
    """Number of the request -> factor of its times."""
    asked: list[PlannedRequest] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _slots: asyncio.Semaphore | None = None

    async def __call__(self, request: PlannedRequest, due_s: float) -> Sample:
        self._slots = self._slots or asyncio.Semaphore(self.slots)
        number, started_s = len(self.asked), now()
        self.asked.append(request)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            async with self._slots:
                return await self._answer(request, due_s, started_s, number)
        finally:
            self._at_once -= 1

    async def _answer(self, request: PlannedRequest, due_s: float, started_s: float, number: int) -> Sample:
        fate, stretch = self.fate(number), self.pace(number)
        if fate is Failure.HTTP_503:
            return Sample(request.index, due_s, started_s, now(), True, failure=fate, retry_after_s=self.retry_after_s)
        num = self.num_tokens(request) if fate is None else 1
        times = [await self._wait(stretch * (self.first_s if token == 0 else self.gap_s)) for token in range(num)]
        return Sample(
            request.index, due_s, started_s, now(), True,
            events=tuple(Event(at_s, EventKind.TEXT) for at_s in times),
            num_prompt_tokens=request.prompt_tokens, num_cached_tokens=self.num_cached,
            num_output_tokens=num if fate is None else None,
            finish_reason="length" if fate is None else None, failure=fate,
        )  # fmt: skip

    async def _wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return now()


async def measure(engine: VirtualEngine, arrivals: Arrivals, limits: RunLimits, work: Workload = WORK) -> Window:
    """One run against an engine."""
    return await LoadGenerator(work, arrivals, engine, now=now, limits=limits).run()


def sample(*times: float, due_s: float = 0.0, ended_s: float | None = None, num_tokens: int | None = None) -> Sample:
    """An answer whose tokens came at these moments."""
    events = tuple(Event(at_s, EventKind.TEXT) for at_s in times)
    end_s = ended_s if ended_s is not None else times[-1]
    tokens = len(times) if num_tokens is None else num_tokens
    return Sample(0, due_s, due_s, end_s, True, events, num_prompt_tokens=10, num_output_tokens=tokens)
