"""The load generator: asks when the workload says, and notes which requests count.

    |<-- warm-up, until steady -->|<---------------- window ---------------->|<- tail: what is under way may end
    begin                         T0                                         T1
    ..requests that do not count..|..the first N that fall due: measured.....|
                                  |        further ones, so that the last measured do not run on an emptying server

The load never pauses between warm-up and window. Measured are the first N requests that fall due from T0 on (or all
within a duration); T1 is the end of the last of them. Every token that arrives between T0 and T1 counts for throughput,
whosever it is. Latency counts from the moment at which a request was due, which is the schedule's in an open loop and
the end of the user's thinking in a closed one.

A request is never repeated. A user whose request failed comes with the next one after Retry-After, or a second: one who
came back at once would be refused a thousand times, and be most of the statistics.

Knows no HTTP: `ask` makes a request and gives its sample. Time is whatever `now` says and the event loop sleeps by.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from chairlift.bench.sample import Sample
from chairlift.bench.workload import Arrivals, Closed, Job, Open, Workload

STEADY_WITHIN = 0.25
REFUSED_S = 1.0
"""Least pause of a user after a failure, where the server names none."""
MAX_REFUSED_S = 60.0
MAX_TAIL = 1.0
"""What is under way at T1 may go on for this many times the window's length."""


class Phase(StrEnum):
    """Where a run is; the value is what its progress says."""

    WARM_UP = "warming up"
    WINDOW = "measuring"
    TAIL = "waiting for the rest"


Ask = Callable[[Job, float], Awaitable[Sample]]
"""(job, when it was due) -> what came of it. Failures are samples, not exceptions."""
Watch = Callable[[Phase, int, int | None, int], None]
"""(phase, ended, of how many, in flight), whenever one of them changes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured. Seconds."""

    num_requests: int | None = 20
    duration_s: float | None = None
    warmup: int | None = None
    """Requests; None: until steady."""
    max_in_flight: int = 256
    spread_s: float = 0.0
    """Over which the users of a closed loop begin."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A request that was made."""

    job: Job
    sample: Sample
    was_held: bool
    """It was due while `max_in_flight` were under way, and waited in the generator."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How warming up went."""

    num_requests: int
    is_steady: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Window:
    """What a run gave."""

    arrivals: Arrivals
    measured: tuple[Shot, ...]
    others: tuple[Shot, ...]
    """Of warm-up and tail."""
    begin_s: float
    end_s: float
    warm_up: WarmUp
    mean_pause_s: float = 0.0
    """As the users of a closed loop really thought."""
    num_cut: int = 0
    """Requests under way at the end that were given up."""
    is_interrupted: bool = False
    max_in_flight: int = 0

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0.0, self.end_s - self.begin_s)

    @property
    def shots(self) -> Iterator[Shot]:
        """Measured and others."""
        return itertools.chain(self.measured, self.others)

    def contains(self, at_s: float) -> bool:
        """Half open at its begin: what arrives exactly then belongs to the time before."""
        return self.begin_s < at_s <= self.end_s


@dataclass
class Steadiness:
    """When warming up is over: every user has had an answer, and the median E2E of the last W answers is within 25 %
    of that of the W before, W = max(3, users / 2). After 4 W answers measuring begins all the same."""

    users: int
    _seen: deque[float] = field(default_factory=deque)
    _num_ended: int = 0
    _waiting_for: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.width = max(3, -(-self.users // 2))
        self._seen = deque(maxlen=2 * self.width)
        self._waiting_for = set(range(self.users))

    @property
    def rule(self) -> str:
        """For the report."""
        return (
            f"until every user had an answer and the median E2E of {self.width} answers was within "
            f"{STEADY_WITHIN:.0%} of that of the {self.width} before, or {4 * self.width} answers"
        )

    def ended(self, user: int, e2e_s: float) -> None:
        """One more answer."""
        self._num_ended += 1
        self._seen.append(e2e_s)
        self._waiting_for.discard(user)

    @property
    def is_steady(self) -> bool:
        """Whether the rule is met."""
        if self._waiting_for or len(self._seen) < 2 * self.width:
            return False
        seen = list(self._seen)
        before, after = median(seen[: self.width]), median(seen[self.width :])
        return abs(after - before) <= STEADY_WITHIN * before

    @property
    def is_over(self) -> bool:
        """Steady, or no longer waited for."""
        return self.is_steady or self._num_ended >= max(4 * self.width, self.users)


class Generator:
    """One run of a workload. `run` once."""

    def __init__(
        self,
        workload: Workload,
        arrivals: Arrivals,
        ask: Ask,
        *,
        now: Callable[[], float],
        limits: Limits,
        watch: Watch | None = None,
    ) -> None:
        self._workload, self._arrivals, self._ask, self._now = workload, arrivals, ask, now
        self._limits, self._watch = limits, watch or (lambda *_: None)
        self._measured: list[Shot] = []
        self._others: list[Shot] = []
        self._pauses: list[float] = []
        self._under_way: set[asyncio.Task[Shot]] = set()
        self._num_due = 0  # measured requests that have fallen due
        self._indexes = itertools.count()
        self._places = asyncio.Semaphore(limits.max_in_flight)
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._end_s: float | None = None  # T1
        self._num_cut = 0
        self._is_interrupted = False
        users = arrivals.users if isinstance(arrivals, Closed) else 1
        self._steadiness = Steadiness(users)
        self._begin_s = math.inf  # T0
        if workload.trace or limits.warmup == 0:
            self._begin_s = now()

    async def run(self) -> Window:
        """Until all measured requests have ended. Cancelling it (Ctrl-C) loses nothing: `window` has what there is."""
        sources = [asyncio.create_task(source) for source in self._sources()]
        for source in sources:
            source.add_done_callback(self._source_ended)
        try:
            await self._until_over()
            self._end_s = self._now()
            await _cancel(sources)
            self._watch(Phase.TAIL, 0, None, len(self._under_way))
            await self._tail()
        finally:
            if self._end_s is None:
                self._end_s = self._now()
                self._is_interrupted = self._error is None
            self._num_cut = len(self._under_way)
            await _cancel([*sources, *self._under_way])
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
            measured=tuple(sorted(self._measured, key=lambda shot: (shot.sample.scheduled_s, shot.job.index))),
            others=tuple(self._others),
            begin_s=begin_s,
            end_s=end_s,
            warm_up=self._warm_up(sum(shot.sample.scheduled_s < begin_s for shot in self._others)),
            mean_pause_s=fmean(self._pauses) if self._pauses else 0.0,
            num_cut=self._num_cut,
            is_interrupted=self._is_interrupted,
            max_in_flight=self._limits.max_in_flight,
        )

    def _warm_up(self, num_requests: int) -> WarmUp:
        if self._workload.trace:
            return WarmUp(0, True, "none: a trace is measured as a whole")
        if self._limits.warmup is not None:
            return WarmUp(num_requests, True, f"until {self._limits.warmup} answers, as asked")
        return WarmUp(num_requests, self._steadiness.is_steady, self._steadiness.rule)

    # -- when requests fall due ---------------------------------------------------------------------------------------

    def _sources(self) -> list[Coroutine[Any, Any, None]]:
        if isinstance(self._arrivals, Open):
            return [self._schedule(self._arrivals)]
        return [self._user(number, self._arrivals) for number in range(self._arrivals.users)]

    async def _schedule(self, arrivals: Open) -> None:
        begin_s = self._now()
        moments: Iterable[float] = arrivals.arrivals(self._workload.seed)
        if self._workload.trace and not arrivals.rate:
            moments = [row.at_s for row in self._workload.trace]
        for at_s in moments:
            await self._sleep_until(begin_s + at_s)
            job = self._next_job()
            if job is None:
                return
            self._launch(job, begin_s + at_s, user=0)

    async def _user(self, number: int, arrivals: Closed) -> None:
        rng = random.Random(f"{self._workload.seed}/user/{number}")
        due_s = self._now() + self._limits.spread_s * number / arrivals.users
        while True:
            await self._sleep_until(due_s)
            job = self._next_job()
            if job is None:
                return
            shot = await asyncio.shield(self._launch(job, due_s, user=number))  # the tail outlives its user
            pause_s = arrivals.pause(rng)
            if not shot.sample.is_ok:
                pause_s = max(pause_s, min(shot.sample.retry_after_s or REFUSED_S, MAX_REFUSED_S))
            self._pauses.append(pause_s)
            due_s = shot.sample.ended_s + pause_s

    def _next_job(self) -> Job | None:
        """None at the end of a trace."""
        try:
            return self._workload.job(next(self._indexes))
        except IndexError:
            return None

    async def _sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - self._now()) > 0:
            await asyncio.sleep(left_s)
        await asyncio.sleep(0)  # a schedule that is late still lets the answers in

    # -- requests -----------------------------------------------------------------------------------------------------

    def _launch(self, job: Job, due_s: float, *, user: int) -> asyncio.Task[Shot]:
        counts = self._counts(due_s)
        self._num_due += counts
        task = asyncio.create_task(self._shoot(job, due_s))
        self._under_way.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, counts, user))
        self._tell()
        return task

    async def _shoot(self, job: Job, due_s: float) -> Shot:
        was_held = self._places.locked()
        async with self._places:
            return Shot(job, await self._ask(job, due_s), was_held)

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

    def _ended(self, task: asyncio.Task[Shot], counts: bool, user: int) -> None:
        self._under_way.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
            return
        shot = task.result()
        (self._measured if counts else self._others).append(shot)
        if self._begin_s == math.inf:
            self._warm(user, shot.sample)
        if self._is_complete():
            self._over.set()
        self._tell()

    def _warm(self, user: int, sample: Sample) -> None:
        self._steadiness.ended(user, sample.e2e_s)
        wanted = self._limits.warmup
        if self._steadiness.is_over if wanted is None else len(self._others) >= wanted:
            self._begin_s = self._now()

    def _is_complete(self) -> bool:
        limits, num_ended = self._limits, len(self._measured)
        if self._workload.trace:
            return num_ended == len(self._workload.trace)
        if limits.duration_s is not None:
            return self._now() >= self._begin_s + limits.duration_s and num_ended == self._num_due
        return num_ended == limits.num_requests

    async def _until_over(self) -> None:
        """With a duration the end may come while nothing ends."""
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
        if self._under_way and self._error is None:
            await asyncio.wait(self._under_way, timeout=MAX_TAIL * self.window.seconds)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._over.set()

    def _source_ended(self, source: asyncio.Task[None]) -> None:
        if not source.cancelled() and (error := source.exception()) is not None:
            self._fail(error)

    def _tell(self) -> None:
        limits = self._limits
        if self._end_s is not None:
            return
        if self._begin_s == math.inf:
            total = 4 * self._steadiness.width if limits.warmup is None else limits.warmup
            self._watch(Phase.WARM_UP, len(self._others), total, len(self._under_way))
        else:
            of = len(self._workload.trace) or (limits.num_requests if limits.duration_s is None else None)
            self._watch(Phase.WINDOW, len(self._measured), of, len(self._under_way))


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Ends tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
