"""What one step may carry: a number of rows, and as many seconds as the predictor says.

A count of tokens alone cannot bound time: far into a long prompt attention costs several times the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from chairlift.engine.request import Request
from chairlift.engine.step import Chunk, Work


class Predictor(Protocol):
    """How long steps take. Neither figure falls when any part of the work grows."""

    def predict(self, work: Work) -> float:
        """Seconds that such a step usually takes."""

    def bound(self, work: Work) -> float:
        """Seconds that hardly any such step exceeds by much: what to plan with where a step must not be late."""


class StepBudget:
    """Adds up what a step was given, and tells what more fits. A request's next chunk begins at `num_computed`."""

    def __init__(self, predictor: Predictor, max_rows: int) -> None:
        self.rows_left = max_rows
        self.work = Work(0, 0, 0, 0)
        self._predictor = predictor

    @property
    def predicted_s(self) -> float:
        """Seconds that the step will take as it stands."""
        return self._predictor.bound(self.work)

    def seconds_with(self, request: Request, num_tokens: int) -> float:
        """Seconds that it will take with the next `num_tokens` of `request` added."""
        return self._predictor.bound(self.work + Chunk(request, request.num_computed, num_tokens).work)

    def spend(self, chunk: Chunk) -> None:
        """Adds a chunk to the step."""
        self.rows_left -= chunk.num_tokens
        self.work.add(chunk.work)

    def most(self, request: Request, target_s: float, max_tokens: int) -> int:
        """The most tokens of `request`, up to `max_tokens`, that keep the step within `target_s`; may be 0."""
        counts = range(1, min(request.num_uncomputed, max_tokens) + 1)
        return bisect_right(counts, target_s, key=lambda n: self.seconds_with(request, n))
