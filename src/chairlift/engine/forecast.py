"""How long those in line will wait, from the measured speed of those that run.

    left      of a request  = tokens to compute * seconds per prompt token + tokens to say * seconds per token
    to say                  = m * (1 - exp(-what `max_tokens` leaves / m)),  m = tokens said / answers that ended early
    wait      of the k-th   = the k-th start, when slots go, as they become free, to whose turn it is

Seconds per token is the mean gap between two tokens of one request; seconds per prompt token is the mean time from
first step to first token, over the prompt's length: both hold what sharing steps costs, and the second what hits save.
The length of an answer is taken for memoryless: what a request has said tells nothing about how much is still to come.
Those that ran into their limit did not end: they only tell that `m`, the mean without any limit, is longer (the maximum
likelihood of an exponential from censored data: Kalbfleisch and Prentice, The Statistical Analysis of Failure Times).

Before the first answer the warm-up's own tokens and the step-time predictor, which it has taught, stand in for both,
and 256 tokens for `m`. Pure; owns the averages and the arithmetic, not the line.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import expm1
from typing import TypeVar

from chairlift.engine.budget import Predictor
from chairlift.engine.line import Line
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.step import Work

T = TypeVar("T")

_ANSWER_TOKENS = 256
"""Length of an answer before any was seen; counts as one answer."""
_LEAST_SHARE = 1e-6
"""Of answers that end before their limit: when none does, they are as long as they may be."""
_MAX_SIMULATED = 500
"""Starts that are worked out one by one; those beyond are taken to follow at the same pace."""


class Mean:
    """A mean that forgets: of the first values all count alike, later ones the last `memory` or so."""

    def __init__(self, memory: int, prior: float | None = None) -> None:
        """`prior` counts as one value; without it the mean is 0 until the first."""
        self.value = 0.0 if prior is None else prior
        self.num = 0 if prior is None else 1  # values so far, at most `memory`
        self._memory = memory

    def add(self, value: float) -> None:
        """Takes in one value."""
        self.num = min(self.num + 1, self._memory)
        self.value += (value - self.value) / self.num


class Speed:
    """What requests cost, in seconds, as measured. Written by the engine thread, read by others as it is."""

    def __init__(self, predictor: Predictor, num_slots: int, max_step_tokens: int) -> None:
        self._predictor = predictor
        self._num_slots = num_slots
        self._max_step_tokens = max_step_tokens
        self._said = Mean(20, prior=_ANSWER_TOKENS)  # tokens of an answer
        self._ended_early = Mean(20, prior=1.0)  # 1 for an answer that ended before its limit
        self._gap_s = Mean(1000)
        self._prompt_tokens = Mean(20)
        self._prefill_s = Mean(20)

    def saw_first_token(self, request: Request) -> None:
        """Its prompt is computed."""
        self._prompt_tokens.add(request.num_prompt)
        self._prefill_s.add(request.timing.first_token_s - request.timing.scheduled_s)

    def saw_next_tokens(self, gaps_s: Iterable[float]) -> None:
        """Further tokens came, each so long after the one before it of its request."""
        for gap_s in gaps_s:
            self._gap_s.add(gap_s)

    def saw_end(self, request: Request) -> None:
        """It has ended, however it ended; one that was never started tells nothing."""
        if request.output:
            self._said.add(len(request.output))
            self._ended_early.add(request.finish_reason is not FinishReason.LENGTH)

    @property
    def token_s(self) -> float:
        """Seconds from one token of a request to the next, with every slot taken.

        What was measured with fewer is too little: it counts at least the step that every slot needs for one token.
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
        return round(self._prompt_tokens.value + self._said.value / 2)

    def left_s(self, request: Request) -> float:
        """Seconds until it ends, from when it has a slot."""
        to_say = self._said.value / max(self._ended_early.value, _LEAST_SHARE)
        if request.params.max_tokens is not None:
            to_say *= -expm1((len(request.output) - request.params.max_tokens) / to_say)
        to_compute = max(0, request.num_uncomputed - 1)
        return to_compute * self.prompt_token_s + to_say * self.token_s


@dataclass(frozen=True, slots=True)
class Member:
    """One that has a slot: whose it is, and how long it will hold it."""

    key: str
    left_s: float


def waits(
    line: Line[T], members: Iterable[Member], *, service_s: Callable[[T], float], seats: Callable[[int], int]
) -> list[tuple[T, float]]:
    """Everybody in `line`, which is used up, with the seconds until they start, in the order of their starts.

    `service_s` is how long one will hold its slot; `seats` is how many may start beside so many members, and lets
    somebody start when there are none.
    """
    ends = [(member.left_s, member.key) for member in members]
    heapq.heapify(ends)
    running = Counter(key for _, key in ends)
    found: list[tuple[T, float]] = []
    now_s, num_free = 0.0, seats(len(ends))
    while line and len(found) < _MAX_SIMULATED:
        first = line.turn(running) if num_free > 0 else None
        if first is None:
            now_s = ends[0][0]
            while ends and ends[0][0] == now_s:
                running[heapq.heappop(ends)[1]] -= 1
            num_free = seats(len(ends))
            continue
        key, item = first
        line.pop(key)
        found.append((item, now_s))
        heapq.heappush(ends, (now_s + service_s(item), key))
        running[key] += 1
        num_free -= 1
    pace_s = now_s / len(found) if found else 0.0
    return found + [(item, now_s + i * pace_s) for i, item in enumerate(line, start=1)]
