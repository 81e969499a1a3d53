"""Several observers in the place of one."""

from __future__ import annotations

from chairlift.engine.observer import Observer, StepStats
from chairlift.engine.request import Request


class Observers(Observer):
    """Tells each of its observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def step_done(self, stats: StepStats) -> None:
        """A step was committed."""
        for observer in self._observers:
            observer.step_done(stats)

    def admitted(self, request: Request) -> None:
        """Its first step was scheduled."""
        for observer in self._observers:
            observer.admitted(request)

    def first_token(self, request: Request) -> None:
        """Its first token was sampled."""
        for observer in self._observers:
            observer.first_token(request)

    def next_token(self, request: Request, gap_s: float) -> None:
        """A further token was sampled."""
        for observer in self._observers:
            observer.next_token(request, gap_s)

    def preempted(self, request: Request) -> None:
        """It lost its blocks."""
        for observer in self._observers:
            observer.preempted(request)

    def finished(self, request: Request) -> None:
        """It ended."""
        for observer in self._observers:
            observer.finished(request)
