"""What the engine tells its observers: metrics, log and summary line. They run on its thread, so they must be quick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.engine.request import Request


@dataclass(slots=True)
class StepStats:
    """One finished step, and where the engine stood after it."""

    seconds: float  # in the runner
    overhead_s: float  # since the step before, outside the kernels, when there was no wait for work
    num_rows: int
    num_prompt_tokens: int  # rows that were prompt tokens, computed for the first time or again
    num_running: int
    num_waiting: int
    num_used_blocks: int  # referenced by a request
    num_blocks: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Where the engine stands; plain numbers that any thread may read."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    last_step_age_s: float | None  # None before the first step


class Observer:
    """Does nothing; override what you want to see."""

    def step_done(self, stats: StepStats) -> None:
        """A step was committed."""

    def admitted(self, request: Request) -> None:
        """Its first step was scheduled: the queue wait is over."""

    def first_token(self, request: Request) -> None:
        """Its first token was sampled, and `num_cached` is final. Once a request, whatever preemptions follow."""

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        """A step sampled a further token of these requests, each so many seconds after the request's last token."""

    def preempted(self, request: Request) -> None:
        """It lost its blocks and will be recomputed."""

    def finished(self, request: Request) -> None:
        """It ended, for whatever reason. Once a request."""

    def step_failed(self) -> None:
        """A step failed and was rolled back. `finished` tells of the requests that this ended."""

    def stalled(self) -> None:
        """There was work and no step ended for too long. Once a stall, and not on the engine thread."""


class Observers(Observer):
    """Passes each event to all observers, in order. An error of one reaches neither the others nor the caller.

    `on_error` gets the first error of each observer.
    """

    def __init__(self, *observers: Observer, on_error: Callable[[Observer, Exception], None]) -> None:
        self._observers = observers
        self._on_error = on_error
        self._failed: list[Observer] = []

    def step_done(self, stats: StepStats) -> None:
        """A step was committed."""
        self._tell(lambda observer: observer.step_done(stats))

    def admitted(self, request: Request) -> None:
        """Its first step was scheduled."""
        self._tell(lambda observer: observer.admitted(request))

    def first_token(self, request: Request) -> None:
        """Its first token was sampled."""
        self._tell(lambda observer: observer.first_token(request))

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        """Further tokens were sampled."""
        self._tell(lambda observer: observer.next_tokens(gaps))

    def preempted(self, request: Request) -> None:
        """It lost its blocks."""
        self._tell(lambda observer: observer.preempted(request))

    def finished(self, request: Request) -> None:
        """It ended."""
        self._tell(lambda observer: observer.finished(request))

    def step_failed(self) -> None:
        """A step failed."""
        self._tell(lambda observer: observer.step_failed())

    def stalled(self) -> None:
        """No step ended for too long."""
        self._tell(lambda observer: observer.stalled())

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                event(observer)
            except Exception as error:
                self._note(observer, error)

    def _note(self, observer: Observer, error: Exception) -> None:
        if not any(observer is failed for failed in self._failed):
            self._failed.append(observer)
            self._on_error(observer, error)
