"""Which request made a step fail: the requests of the step run one by one, and only one that fails alone ends.

    A B C fail together ──> A alone ──> B alone ──> C alone ──> A C together, as if nothing had happened
                            passes      fails: ends  passes

A trial lasts until the request has computed the positions that it had in the failed step. If no request fails alone,
all run together again. If that fails time and again, all end. Pure: knows requests and steps, not the scheduler.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from chairlift.engine.request import Request
from chairlift.engine.step import Step

MAX_ROUNDS_WITHOUT_CULPRIT = 2
"""Rounds of trials in which no request failed alone, with no common step that succeeded, before all requests end."""


class Suspect(NamedTuple):
    """A request of a failed step, and the first position after its chunk."""

    request: Request
    stop: int


class FaultIsolation:
    """Learns how each step went. Tells which request must run alone next, and which requests a failed step ends."""

    def __init__(self) -> None:
        self._suspects: deque[Suspect] = deque()
        self._has_culprit = False  # in this round
        self._num_rounds_without_culprit = 0

    @property
    def next(self) -> Request | None:
        """The request that must run alone in the next step; None when every request may run."""
        while self._suspects and self._suspects[0].request.is_finished:
            self._clear_first()
        return self._suspects[0].request if self._suspects else None

    def passed(self, step: Step) -> None:
        """The step succeeded."""
        if not self._suspects:
            self._num_rounds_without_culprit = 0
        elif step.chunks[0].stop >= self._suspects[0].stop:
            self._clear_first()

    def failed(self, step: Step) -> list[Request]:
        """The step failed. Returns the requests that end; the others start over, and will be tried one by one."""
        if self._suspects:
            self._has_culprit = True
            culprit = self._suspects[0].request
            self._clear_first()
            return [] if culprit.is_finished else [culprit]
        present = [Suspect(chunk.request, chunk.stop) for chunk in step.chunks if not chunk.request.is_finished]
        if self._num_rounds_without_culprit == MAX_ROUNDS_WITHOUT_CULPRIT:
            self._num_rounds_without_culprit = 0
            return [suspect.request for suspect in present]
        self._suspects.extend(present)
        return []

    def clear(self) -> None:
        """Forgets all suspects: they have ended."""
        self._suspects.clear()
        self._has_culprit = False

    def _clear_first(self) -> None:
        self._suspects.popleft()
        if not self._suspects:
            self._num_rounds_without_culprit = 0 if self._has_culprit else self._num_rounds_without_culprit + 1
            self._has_culprit = False
