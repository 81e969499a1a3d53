"""A request: one prompt and its one output, with all that must survive a preemption.

Owns the token counter that scheduling is built on and the stamps that metrics are built on. Knows neither the clock
(the engine stamps it), nor the pool (the scheduler gives it blocks), nor JSON.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.engine.detok import Detokenizer
from chairlift.engine.stops import StopMatcher
from chairlift.errors import ChairliftError

MAX_LOGPROBS = 20
"""Most alternatives reported per token; the native reduction has room for this many."""


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two are what OpenAI clients see as `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a feature off.

    `seed` and `choice` key the counter-based random numbers, so that the k-th token of a request is drawn the same way
    whoever else is served and however often it was preempted.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over the output, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # unsigned 64 bit
    choice: int = 0
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token's and the n most likely
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, from the raw logits (before penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@dataclass(slots=True)
class Timing:
    """Stamps in seconds of the engine's clock; 0.0 means "not yet". None is reset by a preemption."""

    arrival_s: float = 0.0
    scheduled_s: float = 0.0  # first step that computed one of its tokens
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output on their way through the engine.

        tokens   [ prompt ............ | output ...... ]
                 |<- num_computed ->|<- still to compute ->|      num_computed <= num_tokens

    Identity is the object: two requests are never equal.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: frozenset[int]
    detok: Detokenizer
    stops: StopMatcher
    salt: str = ""  # prefix sharing happens among equal salts only
    key_name: str = ""  # whose API key, for fairness and the log
    stream: bool = False
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_computed: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))  # of which steps are copied together
    num_cached: int | None = None  # prompt tokens that were hits when it first ran; None before
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: ChairliftError | None = None
    timing: Timing = field(default_factory=Timing)
    record: bytes = b""  # `params` as the kernels are told, which batch.py makes once
    _seen: dict[int, int] = field(default_factory=dict)
    _num_seen: int = 0

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.prompt) + len(self.output) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, however it ended."""
        return self.finish_reason is not None

    def token_at(self, position: int) -> int:
        """The token at an absolute position."""
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions [start, stop)."""
        n = len(self.prompt)
        return self.prompt[start:stop] + tuple(self.output[max(0, start - n) : max(0, stop - n)])

    def seen(self) -> Mapping[int, int]:
        """Distinct tokens of prompt and output with their count in the output: what penalties look at.

        Kept up to date by what came since the last call, so that a step costs the new tokens only.
        """
        if not self._seen:
            self._seen = dict.fromkeys(self.prompt, 0)
        for token in self.output[self._num_seen :]:
            self._seen[token] = self._seen.get(token, 0) + 1
        self._num_seen = len(self.output)
        return self._seen


@dataclass(slots=True)
class Output:
    """What one step added to one request and may be sent now; text is never retracted. Nobody changes one.

    It is not frozen because one is made per token, and a frozen one takes three times as long.
    """

    request: Request
    text: str
    num_tokens: int  # output tokens so far, with those whose text is still held back
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ChairliftError | None = None
