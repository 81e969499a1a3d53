"""How a request's tokens are chosen, and what is reported of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a feature off.

    `seed` and `choice` key the counter-based random numbers, so that the k-th token of a request is drawn the same way
    whatever else is served, and however often the request was preempted.
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
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, from the raw logits (before penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first
