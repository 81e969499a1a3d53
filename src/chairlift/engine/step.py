"""The step: which tokens of which requests run now. The one value that scheduler, batch and commit share.

request A  pos 0 ............ 47 | 48      one row, samples          (decode)
request B  pos 0 .. 31 | 32 ..... 63 | 64 ..  32 rows, samples none  (a chunk of its prompt)
request C  pos 0 .. 15 | 16 ..... 39          24 rows, last samples  (the end of its prompt)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.engine.request import Request, TokenLogprob


@dataclass(slots=True)
class Work:
    """What the time of a step depends on: counts that add up over its pieces. Only who makes a sum changes it.

    It is not frozen because one is made per token, and a frozen one takes three times as long.
    """

    rows: int  # tokens computed
    kv_tokens: int  # cached tokens that attention works on: a row at position p counts p + 1
    context_tokens: int  # cached tokens that it has to fetch: a piece that ends at position p counts p + 1, once
    logit_rows: int  # rows that need the output head

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.kv_tokens + other.kv_tokens,
            self.context_tokens + other.context_tokens,
            self.logit_rows + other.logit_rows,
        )

    def add(self, other: Work) -> None:
        """The same in place."""
        self.rows += other.rows
        self.kv_tokens += other.kv_tokens
        self.context_tokens += other.context_tokens
        self.logit_rows += other.logit_rows


NO_WORK = Work(0, 0, 0, 0)


class Piece(NamedTuple):
    """One request's part: it computes positions [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """First position not computed by this piece."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the last row's logits choose the next token: only when it catches up."""
        return self.stop == self.request.num_tokens

    @property
    def work(self) -> Work:
        """Its part of the step's work. The output head serves its last row, or each of a prompt that is scored."""
        request, start, num_tokens = self
        stop = start + num_tokens
        is_scored = request.params.prompt_logprobs is not None and start < request.num_prompt
        logit_rows = num_tokens if is_scored else int(stop == request.num_tokens)
        return Work(num_tokens, (start + 1 + stop) * num_tokens // 2, stop, logit_rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces in running order, the seconds that the scheduler reckoned with for them, and what for."""

    pieces: tuple[Piece, ...]
    predicted_s: float
    work: Work = field(default_factory=lambda: NO_WORK)  # of all pieces together, as they were when it was scheduled
    preempted: tuple[Request, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens computed by the step."""
        return sum(piece.num_tokens for piece in self.pieces)


class Sampled(NamedTuple):
    """What the runner chose for one piece that samples; `ok` is False, for any piece, when logits were not finite."""

    token: int
    logprob: TokenLogprob | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back: by position in `Step.pieces`, for those it concerns."""

    sampled: dict[int, Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]]  # for each computed prompt position that has a next prompt token
    seconds: float | None = None  # in the kernels, if known: less than the runner takes
