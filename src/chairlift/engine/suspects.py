"""Who is to blame for a step that failed: its requests are tried one by one, and only who fails alone ends.

    A B C fail together ──> A alone ──> B alone ──> C alone ──> A C together, as if nothing had been
                            passes      fails: ends  passes

A trial lasts until the request has computed what it had in the failed step. What nobody shows alone has no culprit: the
requests run together again, and end together if that fails time and again. Pure; knows requests and steps, not the
scheduler.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from chairlift.engine.request import Request
from chairlift.engine.step import Step

MAX_VAIN_ROUNDS = 2
"""Rounds of trials without a culprit, and without a step together that succeeds, before all are blamed."""


class Suspect(NamedTuple):
    """A request, and the first position that its part of the failed step did not compute."""

    request: Request
    stop: int


class Suspects:
    """Tell it how each step went; it tells who runs next alone, and whom a failed step ends."""

    def __init__(self) -> None:
        self._line: deque[Suspect] = deque()
        self._has_culprit = False  # in this round
        self._num_vain_rounds = 0

    @property
    def next(self) -> Request | None:
        """Who runs alone now; None when the next step is everybody's."""
        while self._line and self._line[0].request.is_finished:
            self._clear_first()
        return self._line[0].request if self._line else None

    def passed(self, step: Step) -> None:
        """The step succeeded."""
        if not self._line:
            self._num_vain_rounds = 0
        elif step.pieces[0].stop >= self._line[0].stop:
            self._clear_first()

    def failed(self, step: Step) -> list[Request]:
        """The step failed: whom that ends. The others are to start over, and will be tried."""
        if self._line:
            self._has_culprit = True
            culprit = self._line[0].request
            self._clear_first()
            return [] if culprit.is_finished else [culprit]
        present = [Suspect(piece.request, piece.stop) for piece in step.pieces if not piece.request.is_finished]
        if self._num_vain_rounds == MAX_VAIN_ROUNDS:
            self._num_vain_rounds = 0
            return [suspect.request for suspect in present]
        self._line.extend(present)
        return []

    def clear(self) -> None:
        """Forgets everybody: they have ended."""
        self._line.clear()
        self._has_culprit = False

    def _clear_first(self) -> None:
        self._line.popleft()
        if not self._line:
            self._num_vain_rounds = 0 if self._has_culprit else self._num_vain_rounds + 1
            self._has_culprit = False
