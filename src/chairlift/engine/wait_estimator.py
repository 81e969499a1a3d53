"""How long waiting requests will wait, estimated from the measured speed of running ones.

    remaining of a request  = tokens to compute * seconds per prompt token + tokens to generate * seconds per token
    to generate             = m * (1 - exp(-tokens left of `max_tokens` / m)),  m = tokens generated / natural ends
    wait of the k-th        = when the k-th request starts, each slot going to the key whose turn it is

Seconds per token is the mean gap between two tokens of one request. Seconds per prompt token is the mean time from
first step to first token, over the prompt's length. Both include what sharing steps costs, the second also what hits
save. The length of an answer is taken to be memoryless: what a request has generated tells nothing about what is to
come. An answer cut by its limit did not end: it only tells that `m`, the mean length without limits, is larger (the
maximum likelihood of an exponential from censored data: Kalbfleisch and Prentice, The Statistical Analysis of Failure
Times).

Before the first answer, the warm-up's tokens and the step-time predictor stand in for the two speeds, and 256 tokens
for `m`. Pure: owns the averages and the arithmetic, not the queue.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import expm1
from typing import TypeVar

from chairlift.engine.budget import Predictor
from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.step import Work

T = TypeVar("T")

_ANSWER_TOKENS = 256
"""Length of an answer before any was seen; counts as one answer."""
_LEAST_SHARE = 1e-6
"""Smallest share of answers assumed to end before their limit. When none does, answers are as long as they may be."""
_MAX_SIMULATED = 500
"""Starts that are simulated one by one. Later ones are assumed to follow at the same pace."""


class MovingMean:
    """The mean of the first `memory` values; after that, old values fade as new ones come."""

    def __init__(self, memory: int, prior: float | None = None) -> None:
        """`prior` counts as one value. Without it, the mean is 0 until the first value."""
        self.value = 0.0 if prior is None else prior
        self.num = 0 if prior is None else 1  # values so far, at most `memory`
        self._memory = memory

    def add(self, value: float) -> None:
        """Adds one value."""
        self.num = min(self.num + 1, self._memory)
        self.value += (value - self.value) / self.num


class Speed:
    """What requests cost in seconds, as measured. The engine thread writes it, any thread may read it."""

    def __init__(self, predictor: Predictor, num_slots: int, max_step_tokens: int) -> None:
        self._predictor = predictor
        self._num_slots = num_slots
        self._max_step_tokens = max_step_tokens
        self._answer_tokens = MovingMean(20, prior=_ANSWER_TOKENS)
        self._natural_ends = MovingMean(20, prior=1.0)  # 1 for an answer that ended before its limit, else 0
        self._gap_s = MovingMean(1000)
        self._prompt_tokens = MovingMean(20)
        self._prefill_s = MovingMean(20)

    def add_first_token(self, request: Request) -> None:
        """Learns from a request whose prompt has just been computed."""
        self._prompt_tokens.add(request.num_prompt)
        self._prefill_s.add(request.timing.first_token_s - request.timing.scheduled_s)

    def add_gaps(self, gaps_s: Iterable[float]) -> None:
        """Learns from tokens that came so many seconds after the one before them of their request."""
        for gap_s in gaps_s:
            self._gap_s.add(gap_s)

    def add_finished(self, request: Request) -> None:
        """Learns from a request that has ended. One that never started tells nothing."""
        if request.output:
            self._answer_tokens.add(len(request.output))
            self._natural_ends.add(request.finish_reason is not FinishReason.LENGTH)

    @property
    def token_s(self) -> float:
        """Seconds from one token of a request to the next, with every slot taken.

        Gaps measured with fewer requests are too short, so a step with one token for every slot is the least it may be.
        """
        slots = self._num_slots
        context_tokens = slots * self._mean_context
        return max(self._gap_s.value, self._predictor.predict(Work(slots, context_tokens, context_tokens, slots)))

    @property
    def prompt_token_s(self) -> float:
        """Seconds for each token of a prompt."""
        if self._prompt_tokens.num:
            return self._prefill_s.value / self._prompt_tokens.value
        rows = self._max_step_tokens
        return self._predictor.predict(Work(rows, rows * rows // 2, rows, 1)) / rows

    @property
    def _mean_context(self) -> int:
        return round(self._prompt_tokens.value + self._answer_tokens.value / 2)

    def remaining_s(self, request: Request) -> float:
        """Seconds from when a request has a slot until it ends."""
        to_generate = self._answer_tokens.value / max(self._natural_ends.value, _LEAST_SHARE)
        if request.params.max_tokens is not None:
            to_generate *= -expm1((len(request.output) - request.params.max_tokens) / to_generate)
        to_compute = max(0, request.num_uncomputed - 1)
        return to_compute * self.prompt_token_s + to_generate * self.token_s


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A request that has a slot: its API key, and how long it will hold the slot."""

    key: str
    remaining_s: float


def estimate_waits(
    queue: FairQueue[T],
    holders: Iterable[SlotHolder],
    *,
    service_s: Callable[[T], float],
    free_slots: Callable[[int], int],
) -> list[tuple[T, float]]:
    """Every item of `queue` with the seconds until it starts, in order of their starts. Empties `queue`.

    `service_s` tells how long an item will hold its slot. `free_slots(n)` is how many items may start while n
    hold a slot; `free_slots(0)` is at least 1.
    """
    ends = [(holder.remaining_s, holder.key) for holder in holders]
    heapq.heapify(ends)
    running = Counter(key for _, key in ends)
    estimates: list[tuple[T, float]] = []
    now_s, num_free = 0.0, free_slots(len(ends))
    while queue and len(estimates) < _MAX_SIMULATED:
        first = queue.next(running) if num_free > 0 else None
        if first is None:
            now_s = ends[0][0]
            while ends and ends[0][0] == now_s:
                running[heapq.heappop(ends)[1]] -= 1
            num_free = free_slots(len(ends))
            continue
        key, item = first
        queue.pop(key)
        estimates.append((item, now_s))
        heapq.heappush(ends, (now_s + service_s(item), key))
        running[key] += 1
        num_free -= 1
    pace_s = now_s / len(estimates) if estimates else 0.0
    return estimates + [(item, now_s + i * pace_s) for i, item in enumerate(queue, start=1)]
