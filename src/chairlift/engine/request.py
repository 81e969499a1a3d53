"""A request: one prompt and its one output, with all that must survive a preemption.

Each part of its state has one writer: the scheduler its blocks and counters, `finish` its output and how it ended,
telemetry its timestamps. Knows neither the clock, nor the pool, nor JSON.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.engine.detok import Detokenizer
from chairlift.engine.sampling_params import SamplingParams, TokenLogprob
from chairlift.engine.stops import StopMatcher
from chairlift.errors import ChairliftError


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two are what OpenAI clients see as `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True)
class RequestTiming:
    """Seconds of the engine's clock; 0.0 means "not yet". A preemption resets nothing."""

    arrival_s: float = 0.0
    scheduled_s: float = 0.0  # first step that computed one of its tokens
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output.

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
    salt: str = ""  # prefixes are shared among equal salts only
    group: str = ""  # of the choices of one prompt; without a prefix cache, prefixes are shared within a group only
    key_name: str = ""  # of the API key, for fairness and the log
    stream: bool = False
    # Written by the scheduler:
    num_computed: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))
    num_cached: int | None = None  # prompt tokens that were hits when it first ran; None before
    num_preemptions: int = 0
    # Written by `finish`:
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ChairliftError | None = None
    # Written by telemetry:
    timing: RequestTiming = field(default_factory=RequestTiming)
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
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def needs_every_prompt_row(self) -> bool:
        """Whether its prompt is being scored still, so that no row of it may come from the cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    def token_at(self, position: int) -> int:
        """The token at an absolute position."""
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions [start, stop)."""
        n = len(self.prompt)
        return self.prompt[start:stop] + tuple(self.output[max(0, start - n) : max(0, stop - n)])

    def seen(self) -> Mapping[int, int]:
        """Distinct tokens of prompt and output with their count in the output, for penalties.

        Each call adds what came since the last one, so that a step costs the new tokens only.
        """
        if not self._seen:
            self._seen = dict.fromkeys(self.prompt, 0)
        for token in self.output[self._num_seen :]:
            self._seen[token] = self._seen.get(token, 0) + 1
        self._num_seen = len(self.output)
        return self._seen


@dataclass(slots=True)
class Output:
    """What one step added to one request. It may be sent at once: text is never retracted.

    Treat it as frozen. It is not declared so because one is made per token, and a frozen one takes three times as long.
    """

    request: Request
    text: str
    num_tokens: int  # output tokens so far, with those whose text is still held back
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ChairliftError | None = None
