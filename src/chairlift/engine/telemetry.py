"""What the engine measures: timestamps of requests, statistics of steps, and preemptions. Passes them to the observers.

Owns the observers and everything that is written to `Request.timing`. Decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from chairlift.engine.blocks import BlockPool
from chairlift.engine.observer import EngineSnapshot, Observer, Observers, StepStats
from chairlift.engine.request import Output, Request
from chairlift.engine.scheduler import Scheduler
from chairlift.engine.step import Step
from chairlift.engine.wait_estimator import Speed

log = logging.getLogger(__name__)

_WARN_EVERY_S = 1.0


class StepStart(NamedTuple):
    """Where things stood before a step ran."""

    start_s: float
    num_outputs: list[int]  # output tokens of each chunk's request


class Telemetry:
    """The engine thread calls it at each event. `arrived`, `finished` and `stalled` are safe from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        speed: Speed,
        clock: Callable[[], float],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.num_steps = 0
        self.preemptions = PreemptionLog()
        self._scheduler = scheduler
        self._pool = pool
        self._speed = speed
        self._clock = clock
        self._observers = Observers(*observers, on_error=_log_observer)
        self._step_end_s: float | None = None  # end of the step before; None after a wait for work or a failure

    def snapshot(self, since_progress_s: float) -> EngineSnapshot:
        """Where the engine stands now; any thread may ask. The last step ended `since_progress_s` ago, if one has."""
        return EngineSnapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_used_blocks=self._pool.num_held,
            num_blocks=self._pool.num_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.preemptions.num,
            last_step_age_s=since_progress_s if self.num_steps else None,
        )

    def arrived(self, requests: Iterable[Request]) -> None:
        """Requests were submitted."""
        for request in requests:
            request.timing.arrival_s = self._clock()

    def step_started(self, step: Step) -> StepStart:
        """A step was scheduled and is about to run."""
        now_s = self._clock()
        for request in step.preempted:
            self.preemptions.add(request)
            self._observers.preempted(request)
        self.preemptions.warn(now_s)
        for request, _, _ in step.chunks:
            if request.timing.scheduled_s == 0.0:
                request.timing.scheduled_s = now_s
                self._observers.admitted(request)
        return StepStart(now_s, [len(request.output) for request, _, _ in step.chunks])

    def step_done(self, step: Step, start: StepStart, end_s: float, in_kernels_s: float | None) -> None:
        """A step that ended at `end_s` was committed. `in_kernels_s` None: as long as the whole call."""
        seconds = end_s - start.start_s
        overhead_s = 0.0
        if self._step_end_s is not None:
            overhead_s = end_s - self._step_end_s - (seconds if in_kernels_s is None else in_kernels_s)
        self._step_end_s = end_s
        self.num_steps += 1
        self._stamp_tokens(step, start.num_outputs, end_s)
        in_prompt = [chunk for chunk in step.chunks if chunk.start < chunk.request.num_prompt]
        self._observers.step_done(
            StepStats(
                seconds=seconds,
                overhead_s=overhead_s,
                num_rows=step.work.rows,
                num_prompt_tokens=sum(min(chunk.stop, chunk.request.num_prompt) - chunk.start for chunk in in_prompt),
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_used_blocks=self._pool.num_held,
                num_blocks=self._pool.num_blocks,
                predicted_s=step.predicted_s,
            )
        )

    def step_failed(self) -> None:
        """A step failed and was rolled back."""
        self._step_end_s = None
        self._observers.step_failed()

    def idle(self) -> None:
        """There is no work: the time until the next step is no overhead."""
        self._step_end_s = None
        self.preemptions.warn(self._clock())

    def finished(self, outputs: Iterable[Output]) -> None:
        """Stamps the requests whose last event is among these."""
        for output in outputs:
            if output.finish_reason is not None:
                request = output.request
                request.timing.finished_s = self._clock()
                self._speed.add_finished(request)
                self._observers.finished(request)

    def stalled(self) -> None:
        """There is work and no step ends."""
        self._observers.stalled()

    def _stamp_tokens(self, step: Step, num_before: Sequence[int], now_s: float) -> None:
        gaps: list[tuple[Request, float]] = []
        for (request, _, _), num in zip(step.chunks, num_before, strict=True):
            if len(request.output) == num:
                continue
            timing = request.timing
            if timing.first_token_s == 0.0:
                timing.first_token_s = now_s
                self._speed.add_first_token(request)
                self._observers.first_token(request)
            else:
                gaps.append((request, now_s - timing.last_token_s))
            timing.last_token_s = now_s
        self._speed.add_gaps([gap_s for _, gap_s in gaps])
        self._observers.next_tokens(gaps)


class PreemptionLog:
    """Counts preemptions, and warns of them at most once a second."""

    def __init__(self) -> None:
        self.num = 0
        self._num_logged = 0
        self._logged_s = float("-inf")
        self._last_id = ""

    def add(self, request: Request) -> None:
        """Counts one preemption of `request`."""
        self.num += 1
        self._last_id = request.id

    def warn(self, now_s: float) -> None:
        """Logs the preemptions since the last warning, unless that was less than a second ago."""
        if self.num == self._num_logged or now_s - self._logged_s < _WARN_EVERY_S:
            return
        log.warning(
            "the KV pool is full: %d more preempted, the last of them request %s; they resume when others have ended "
            "(--kv-memory enlarges the pool, a smaller --max-num-seqs lets more of them wait first)",
            self.num - self._num_logged,
            self._last_id,
        )
        self._num_logged, self._logged_s = self.num, now_s


def _log_observer(observer: Observer, error: Exception) -> None:
    log.error("%s failed, and goes on unless it fails again: this is said once", observer, exc_info=error)
