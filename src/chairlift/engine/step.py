"""The step: which tokens of which requests run now. The one value that scheduler, batch and commit share.

request A  pos 0 ............ 47 | 48      one row, samples          (decode)
request B  pos 0 .. 31 | 32 ..... 63 | 64 ..  32 rows, samples none  (a chunk of its prompt)
request C  pos 0 .. 15 | 16 ..... 39          24 rows, last samples  (the end of its prompt)
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
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


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces in running order, and what the scheduler expected of them."""

    pieces: tuple[Piece, ...]
    predicted_s: float
    preempted: tuple[Request, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens computed by the step."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def kv_tokens_read(self) -> int:
        """Cached tokens that attention reads, summed over rows: row at position p reads p + 1."""
        return sum((p.start + 1 + p.stop) * p.num_tokens // 2 for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the runner chose for one piece that samples; `ok` is False, for any piece, when logits were not finite."""

    token: int
    logprob: TokenLogprob | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back: by position in `Step.pieces`, for those it concerns."""

    sampled: dict[int, Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]]  # for each computed prompt position that has a next prompt token
