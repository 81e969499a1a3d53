"""The load generator: sends requests when they are due, and notes which of them count.

    |<-- warm-up, until steady -->|<---------------- window ---------------->|<- tail: requests in flight may end
    begin                         T0                                         T1
    ..requests that do not count..|..the first N that fall due: measured.....|
                                  |        further ones, so that the last measured do not run on an emptying server

The load does not pause between warm-up and window. The first N requests that fall due from T0 on are measured (or all
within a duration), and T1 is the end of the last of them. Throughput counts every token that arrives between T0 and T1,
also those of requests that are not measured. Latency counts from the moment at which a request was due: that of the
schedule in an open loop, the end of the user's thinking in a closed one.

A request is never repeated. A user whose request failed sends the next one after Retry-After, or after a second. If he
came back at once, he would be refused a thousand times and make up most of the statistics.

Knows no HTTP: `send` sends a request and gives its sample. Time is what `now` says and the event loop sleeps by.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from chairlift.bench.client.sample import Sample
from chairlift.bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop
from chairlift.bench.load.workload import PlannedRequest, Workload

STEADY_WITHIN = 0.25
REFUSED_S = 1.0
"""Least pause of a user after a failure for which the server names none."""
MAX_REFUSED_S = 60.0
MAX_TAIL = 1.0
"""Requests in flight at T1 may go on for this many times the window's length."""


class Phase(StrEnum):
    """The phase of a run. The value is what the progress display says."""

    WARM_UP = "warming up"
    WINDOW = "measuring"
    TAIL = "waiting for the rest"


SendRequest = Callable[[PlannedRequest, float], Awaitable[Sample]]
"""(request, when it was due) -> its sample. A failure is a sample, not an exception."""
OnProgress = Callable[[Phase, int, int | None, int], None]
"""Called with (phase, ended, total or None, in flight) whenever one of them changes."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How much is measured, and the bounds of a run."""

    num_requests: int | None = 20
    duration_s: float | None = None
    warmup: int | None = None  # requests of the warm-up; None: until steady
    max_in_flight: int = 256
    spread_s: float = 0.0  # time over which the users of a closed loop begin


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request that was sent and has ended."""

    request: PlannedRequest
    sample: Sample
    was_held: bool  # it was due while `max_in_flight` others were in flight, and waited in the generator


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The warm-up: its length, whether the latency settled, and the rule that ended it."""

    num_requests: int
    is_steady: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Window:
    """The requests of a run, and its window in seconds on the run's clock."""

    arrivals: Arrivals
    measured: tuple[Attempt, ...]
    others: tuple[Attempt, ...]  # those of warm-up and tail
    begin_s: float
    end_s: float
    warm_up: WarmUp
    mean_pause_s: float = 0.0  # mean time that the users of a closed loop thought
    num_cut: int = 0  # requests in flight at the end that were given up
    is_interrupted: bool = False

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return max(0.0, self.end_s - self.begin_s)

    @property
    def attempts(self) -> Iterator[Attempt]:
        """Measured and others."""
        return itertools.chain(self.measured, self.others)

    def contains(self, at_s: float) -> bool:
        """Whether a moment is in (begin, end]."""
        return self.begin_s < at_s <= self.end_s


class Steadiness:
    """Decides when the warm-up is over.

    It is over when every user has had an answer, and the median E2E of the last W answers is within 25 % of that of the
    W before, where W = max(3, users / 2). After 4 W answers measuring begins in any case.
    """

    def __init__(self, users: int) -> None:
        self.width = max(3, -(-users // 2))
        self._seen: deque[float] = deque(maxlen=2 * self.width)
        self._least = max(4 * self.width, users)
        self._num_ended = 0
        self._waiting_for = set(range(users))

    @property
    def rule(self) -> str:
        """For the report."""
        return (
            f"until every user had an answer and the median E2E of {self.width} answers was within "
            f"{STEADY_WITHIN:.0%} of that of the {self.width} before, or {4 * self.width} answers"
        )

    def ended(self, user: int, e2e_s: float) -> None:
        """Counts one more answer."""
        self._num_ended += 1
        self._seen.append(e2e_s)
        self._waiting_for.discard(user)

    @property
    def is_steady(self) -> bool:
        """Whether the latency has settled."""
        if self._waiting_for or len(self._seen) < 2 * self.width:
            return False
        seen = list(self._seen)
        before, after = median(seen[: self.width]), median(seen[self.width :])
        return abs(after - before) <= STEADY_WITHIN * before

    @property
    def is_over(self) -> bool:
        """Whether the latency has settled, or took too long to."""
        return self.is_steady or self._num_ended >= self._least


class LoadGenerator:
    """One run of a workload. Call `run` once."""

    def __init__(
        self,
        workload: Workload,
        arrivals: Arrivals,
        send: SendRequest,
        *,
        now: Callable[[], float],
        limits: RunLimits,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._workload, self._arrivals, self._send, self._now = workload, arrivals, send, now
        self._limits, self._on_progress = limits, on_progress or (lambda *_: None)
        self._measured: list[Attempt] = []
        self._others: list[Attempt] = []
        self._pauses: list[float] = []
        self._in_flight: set[asyncio.Task[Attempt]] = set()
        self._num_due = 0  # measured requests that have fallen due
        self._indexes = itertools.count()
        self._free_places = asyncio.Semaphore(limits.max_in_flight)
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._end_s: float | None = None  # T1
        self._num_cut = 0
        self._is_interrupted = False
        users = arrivals.users if isinstance(arrivals, ClosedLoop) else 1
        self._steadiness = Steadiness(users)
        self._begin_s = math.inf  # T0
        if workload.trace or limits.warmup == 0:
            self._begin_s = now()

    async def run(self) -> Window:
        """Runs until all measured requests have ended. After a cancel (Ctrl-C) `window` has what was measured."""
        if isinstance(self._arrivals, OpenLoop):
            sources = [asyncio.create_task(self._schedule(self._arrivals))]
        else:
            users = range(self._arrivals.users)
            sources = [asyncio.create_task(self._user(number, self._arrivals)) for number in users]
        for source in sources:
            source.add_done_callback(self._source_ended)
        try:
            await self._until_over()
            self._end_s = self._now()
            await _cancel(sources)
            self._on_progress(Phase.TAIL, 0, None, len(self._in_flight))
            await self._tail()
        finally:
            if self._end_s is None:
                self._end_s = self._now()
                self._is_interrupted = self._error is None
            self._num_cut = len(self._in_flight)
            await _cancel([*sources, *self._in_flight])
        if self._error is not None:
            raise self._error
        return self.window

    @property
    def window(self) -> Window:
        """What was measured so far."""
        end_s = self._now() if self._end_s is None else self._end_s
        begin_s = min(self._begin_s, end_s)
        return Window(
            arrivals=self._arrivals,
            measured=tuple(
                sorted(self._measured, key=lambda attempt: (attempt.sample.scheduled_s, attempt.request.index))
            ),
            others=tuple(self._others),
            begin_s=begin_s,
            end_s=end_s,
            warm_up=self._warm_up(sum(attempt.sample.scheduled_s < begin_s for attempt in self._others)),
            mean_pause_s=fmean(self._pauses) if self._pauses else 0.0,
            num_cut=self._num_cut,
            is_interrupted=self._is_interrupted,
        )

    def _warm_up(self, num_requests: int) -> WarmUp:
        if self._workload.trace:
            return WarmUp(0, True, "none: a trace is measured as a whole")
        if self._limits.warmup is not None:
            return WarmUp(num_requests, True, f"until {self._limits.warmup} answers, as asked")
        return WarmUp(num_requests, self._steadiness.is_steady, self._steadiness.rule)

    async def _schedule(self, arrivals: OpenLoop) -> None:
        begin_s = self._now()
        moments: Iterable[float] = arrivals.moments(self._workload.seed)
        if self._workload.trace and not arrivals.rate:
            moments = [row.at_s for row in self._workload.trace]
        for at_s in moments:
            await self._sleep_until(begin_s + at_s)
            request = self._next_request()
            if request is None:
                return
            self._start(request, begin_s + at_s, user=0)

    async def _user(self, number: int, arrivals: ClosedLoop) -> None:
        rng = random.Random(f"{self._workload.seed}/user/{number}")
        due_s = self._now() + self._limits.spread_s * number / arrivals.users
        while True:
            await self._sleep_until(due_s)
            request = self._next_request()
            if request is None:
                return
            attempt = await asyncio.shield(self._start(request, due_s, user=number))  # the tail outlives its user
            pause_s = arrivals.pause(rng)
            if not attempt.sample.is_ok:
                pause_s = max(pause_s, min(attempt.sample.retry_after_s or REFUSED_S, MAX_REFUSED_S))
            self._pauses.append(pause_s)
            due_s = attempt.sample.ended_s + pause_s

    def _next_request(self) -> PlannedRequest | None:
        """The next request; None at the end of a trace."""
        try:
            return self._workload.request(next(self._indexes))
        except IndexError:
            return None

    async def _sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - self._now()) > 0:
            await asyncio.sleep(left_s)
        await asyncio.sleep(0)  # lets answers arrive even if the schedule is late

    def _start(self, request: PlannedRequest, due_s: float, *, user: int) -> asyncio.Task[Attempt]:
        counts = self._counts(due_s)
        self._num_due += counts
        task = asyncio.create_task(self._run_one(request, due_s))
        self._in_flight.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, counts, user))
        self._report_progress()
        return task

    async def _run_one(self, request: PlannedRequest, due_s: float) -> Attempt:
        was_held = self._free_places.locked()
        async with self._free_places:
            return Attempt(request, await self._send(request, due_s), was_held)

    def _counts(self, due_s: float) -> bool:
        """Whether a request that falls due now is measured."""
        limits = self._limits
        if due_s < self._begin_s:
            return False
        if self._workload.trace:
            return True
        if limits.duration_s is not None:
            return due_s < self._begin_s + limits.duration_s
        return limits.num_requests is None or self._num_due < limits.num_requests

    def _ended(self, task: asyncio.Task[Attempt], counts: bool, user: int) -> None:
        self._in_flight.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
            return
        attempt = task.result()
        (self._measured if counts else self._others).append(attempt)
        if self._begin_s == math.inf:
            self._warm(user, attempt.sample)
        if self._is_complete():
            self._over.set()
        self._report_progress()

    def _warm(self, user: int, sample: Sample) -> None:
        self._steadiness.ended(user, sample.e2e_s)
        warmup = self._limits.warmup
        if self._steadiness.is_over if warmup is None else len(self._others) >= warmup:
            self._begin_s = self._now()

    def _is_complete(self) -> bool:
        limits, num_ended = self._limits, len(self._measured)
        if self._workload.trace:
            return num_ended == len(self._workload.trace)
        if limits.duration_s is not None:
            return self._now() >= self._begin_s + limits.duration_s and num_ended == self._num_due
        return num_ended == limits.num_requests

    async def _until_over(self) -> None:
        """Waits for the end of the window. With a duration, it may come while no request ends."""
        limits = self._limits
        while not self._over.is_set():
            left_s = None
            if limits.duration_s is not None and self._begin_s < math.inf:
                left_s = self._begin_s + limits.duration_s - self._now()
                if left_s <= 0:
                    left_s = None
                    if self._is_complete():
                        return
            elif limits.duration_s is not None:
                left_s = limits.duration_s
            try:
                await asyncio.wait_for(self._over.wait(), left_s)
            except TimeoutError:
                continue

    async def _tail(self) -> None:
        if self._in_flight and self._error is None:
            await asyncio.wait(self._in_flight, timeout=MAX_TAIL * self.window.seconds)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._over.set()

    def _source_ended(self, source: asyncio.Task[None]) -> None:
        if not source.cancelled() and (error := source.exception()) is not None:
            self._fail(error)

    def _report_progress(self) -> None:
        limits = self._limits
        if self._end_s is not None:
            return
        if self._begin_s == math.inf:
            total = 4 * self._steadiness.width if limits.warmup is None else limits.warmup
            self._on_progress(Phase.WARM_UP, len(self._others), total, len(self._in_flight))
        else:
            of = len(self._workload.trace) or (limits.num_requests if limits.duration_s is None else None)
            self._on_progress(Phase.WINDOW, len(self._measured), of, len(self._in_flight))


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
