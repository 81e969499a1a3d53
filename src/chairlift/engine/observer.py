"""What the engine tells those who watch it: metrics, log, summary line. Called on the engine thread, so be quick."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.request import Request


@dataclass(frozen=True, slots=True)
class StepStats:
    """One finished step, and where the engine stood after it."""

    seconds: float  # in the runner
    overhead_s: float  # between this step's native call and the one before it, when there was no wait for work
    num_rows: int
    num_prompt_tokens: int  # rows that were prompt tokens, computed for the first time or again
    num_generated: int  # tokens sampled
    num_running: int
    num_waiting: int
    num_used_blocks: int  # referenced by a request
    num_blocks: int
    predicted_s: float


class Observer:
    """Does nothing; override what you want to see."""

    def step_done(self, stats: StepStats) -> None:
        """A step was committed."""

    def admitted(self, request: Request) -> None:
        """Its first step was scheduled: the queue wait is over and `num_cached` is known."""

    def first_token(self, request: Request) -> None:
        """Its first token was sampled; not again after a preemption."""

    def next_token(self, request: Request, gap_s: float) -> None:
        """A further token was sampled, `gap_s` after the one before it (preempted time included)."""

    def preempted(self, request: Request) -> None:
        """It lost its blocks and will be recomputed."""

    def finished(self, request: Request) -> None:
        """It ended, however it ended; exactly once."""
