"""What one step may carry: a number of rows, and as many seconds as the predictor says.

A count of tokens alone cannot bound time: far into a long prompt attention costs several times the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from chairlift.engine.request import Request
from chairlift.engine.step import Piece, Work


class Predictor(Protocol):
    """`predictor.StepTime`, or a known cost in tests; neither figure falls when any part of the work grows."""

    def predict(self, work: Work) -> float:
        """Seconds that such a step usually takes."""

    def bound(self, work: Work) -> float:
        """Seconds to reckon with where a step must not be late: hardly any takes much longer."""


class Budget:
    """Sums up what a step was given, and tells what more fits. Requests continue where they are: at `num_computed`."""

    def __init__(self, predictor: Predictor, max_rows: int) -> None:
        self.rows_left = max_rows
        self.work = Work(0, 0, 0, 0)
        self._predictor = predictor

    @property
    def predicted_s(self) -> float:
        """Seconds to reckon with for the step as it stands."""
        return self._predictor.bound(self.work)

    def seconds_with(self, request: Request, num_tokens: int) -> float:
        """The same when it computes the next `num_tokens` of `request` too."""
        return self._predictor.bound(self.work + Piece(request, request.num_computed, num_tokens).work)

    def spend(self, piece: Piece) -> None:
        """Adds a piece to the step."""
        self.rows_left -= piece.num_tokens
        self.work.add(piece.work)

    def most(self, request: Request, target_s: float, max_tokens: int) -> int:
        """Most tokens of `request`, at most `max_tokens`, with which the step keeps to `target_s`; may be 0."""
        counts = range(1, min(request.num_uncomputed, max_tokens) + 1)
        return bisect_right(counts, target_s, key=lambda n: self.seconds_with(request, n))
