"""What one step may carry: a number of rows, and as many seconds as the predictor says.

A count of tokens alone cannot bound time: far into a long prompt attention costs several times the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from chairlift.engine.request import Request


class Predictor(Protocol):
    """`predictor.StepTime`, or a known cost in tests; must not fall when any argument grows."""

    def predict(self, rows: int, kv_tokens: int, logit_rows: int) -> float:
        """Seconds that a step takes."""


class Budget:
    """Sums up what a step was given, and tells what more fits. Requests continue where they are: at `num_computed`."""

    def __init__(self, predictor: Predictor, max_rows: int) -> None:
        self.rows_left = max_rows
        self._predictor = predictor
        self._num_rows = 0
        self._kv_tokens = 0
        self._logit_rows = 0

    @property
    def predicted_s(self) -> float:
        """Seconds that the step takes as it stands."""
        return self._predictor.predict(self._num_rows, self._kv_tokens, self._logit_rows)

    def seconds_with(self, request: Request, num_tokens: int) -> float:
        """Seconds that it takes when it computes the next `num_tokens` of `request` too."""
        return self._predictor.predict(
            self._num_rows + num_tokens,
            self._kv_tokens + _kv_tokens_read(request.num_computed, num_tokens),
            self._logit_rows + _logit_rows(request, num_tokens),
        )

    def spend(self, request: Request, num_tokens: int) -> None:
        """Adds the next `num_tokens` of `request` to the step."""
        self.rows_left -= num_tokens
        self._num_rows += num_tokens
        self._kv_tokens += _kv_tokens_read(request.num_computed, num_tokens)
        self._logit_rows += _logit_rows(request, num_tokens)

    def most(self, request: Request, target_s: float, max_tokens: int) -> int:
        """Most tokens of `request`, at most `max_tokens`, with which the step keeps to `target_s`; may be 0."""
        counts = range(1, min(request.num_uncomputed, max_tokens) + 1)
        return bisect_right(counts, target_s, key=lambda n: self.seconds_with(request, n))


def _kv_tokens_read(start: int, num_tokens: int) -> int:
    """Cached tokens that attention reads for positions [start, start + num_tokens): the sum of p + 1."""
    return num_tokens * (2 * start + num_tokens + 1) // 2


def _logit_rows(request: Request, num_tokens: int) -> int:
    """Rows that need the output head: the last one, or each of a prompt that is scored."""
    if request.params.prompt_logprobs is not None and request.num_computed < request.num_prompt:
        return num_tokens
    return int(num_tokens == request.num_uncomputed)
