"""The step: which tokens of which requests run now. The one value that scheduler, batch and commit share.

request A  pos 0 ............ 47 | 48      one row, samples          (decode)
request B  pos 0 .. 31 | 32 ..... 63 | 64 ..  32 rows, samples none  (a chunk of its prompt)
request C  pos 0 .. 15 | 16 ..... 39          24 rows, last samples  (the end of its prompt)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.engine.request import Request
from chairlift.engine.sampling_params import TokenLogprob


@dataclass(slots=True)
class Work:
    """What the time of a step depends on: counts that add up over its chunks.

    Treat it as frozen unless you made it. It is not declared so because one is made per token, and a frozen one takes
    three times as long.
    """

    rows: int  # tokens computed
    kv_tokens: int  # cached tokens that attention works on: a row at position p counts p + 1
    context_tokens: int  # cached tokens that it has to fetch: a chunk that ends at position p counts p + 1, once
    logit_rows: int  # rows that need the output head

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.kv_tokens + other.kv_tokens,
            self.context_tokens + other.context_tokens,
            self.logit_rows + other.logit_rows,
        )

    def add(self, other: Work) -> None:
        """Adds `other` in place."""
        self.rows += other.rows
        self.kv_tokens += other.kv_tokens
        self.context_tokens += other.context_tokens
        self.logit_rows += other.logit_rows


NO_WORK = Work(0, 0, 0, 0)


class Chunk(NamedTuple):
    """One request's part of a step: positions [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """First position after it."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether its last row chooses the next token: true when it reaches the end of the known tokens."""
        return self.stop == self.request.num_tokens

    @property
    def work(self) -> Work:
        """Its part of the step's work. The output head runs on its last row, or on each row of a scored prompt."""
        request, start, num_tokens = self
        stop = start + num_tokens
        is_scored = request.params.prompt_logprobs is not None and start < request.num_prompt
        logit_rows = num_tokens if is_scored else int(stop == request.num_tokens)
        return Work(num_tokens, (start + 1 + stop) * num_tokens // 2, stop, logit_rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Chunks in running order, and how long the scheduler expects them to take."""

    chunks: tuple[Chunk, ...]
    predicted_s: float
    work: Work = field(default_factory=lambda: NO_WORK)  # of all chunks together
    preempted: tuple[Request, ...] = ()  # requests that lost their blocks for it

    @property
    def num_rows(self) -> int:
        """Rows of all chunks: tokens computed by the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Sampled(NamedTuple):
    """What the runner chose for one chunk. `ok` is False when its logits were not finite; `token` is then no token."""

    token: int
    logprob: TokenLogprob | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back, keyed by index into `Step.chunks`."""

    sampled: dict[int, Sampled]  # for each chunk that samples, and for each whose logits were not finite
    prompt_logprobs: dict[int, list[TokenLogprob]]  # for each computed prompt position that has a next prompt token
    seconds: float | None = None  # spent in the kernels; None when the backend does not tell
