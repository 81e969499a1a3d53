"""The op list: all that a model file may ask for, and what goes into and comes out of one step.

A model is a plain function `forward(ops, spec, weights) -> activations`. `kernels/reference.py` runs it on numpy arrays
once a step; `kernels/native.py` runs it once with symbols and records a Program that the compiled core replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from chairlift.models.spec import ModelSpec, RopeSpec

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

MAX_TOP = 20
"""Alternatives per row that a step can report."""

Activation = Literal["silu", "gelu_tanh"]
"""Of a gate g: "silu" is g / (1 + exp(-g)); "gelu_tanh" is g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
(Hendrycks and Gimpel 2016)."""

X = TypeVar("X")
"""Activations, (rows, width): an array for the reference, a buffer symbol for the recorder."""
W = TypeVar("W", contravariant=True)
"""A weight as the backend holds it."""


class Ops(Protocol[X, W]):
    """Every op acts on rows; a row's result never depends on other rows except through the KV cache."""

    def embed(self, table: W) -> X:
        """Rows of the table at the step's tokens."""

    def rms_norm(self, x: X, weight: W, eps: float) -> X:
        """x / sqrt(mean(x^2) + eps) * weight over each group of len(weight) lanes: a head's norm when shorter."""

    def linear(self, x: X, weight: W, bias: W | None = None) -> X:
        """x @ weight.T + bias. x is rounded as `rounding.input_dtype` says of the weight: to
        bf16, per 32 lanes to levels of 8 or 16 bits, or not at all."""

    def rope(self, x: X, rope: RopeSpec, head_dim: int) -> X:
        """Rotates each head, `head_dim` lanes, at the step's positions."""

    def attend(  # noqa: PLR0913 - all that models ask of attention
        self,
        q: X,
        k: X,
        v: X,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: W | None = None,
    ) -> X:
        """Writes this step's k and v into the cache, then causal attention over each row's own sequence.

        Keys and values are read back as the cache rounds them. A score is q . k * scale. `softcap` makes
        softcap * tanh(score / softcap) of it (Gemma Team 2024). With a `window` a row at position p sees positions
        p - window + 1 to p, else 0 to p. `sinks`, one logit per query head, join the softmax's sum and have no value
        (Xiao et al. 2024).
        """

    def gated(self, gate: X, up: X, activation: Activation) -> X:
        """activation(gate) * up (Shazeer 2020)."""

    def add(self, a: X, b: X) -> X:
        """a + b: the residual."""

    def logits(self, x: X, head: W) -> X:
        """linear(x, head) for the rows that need logits only."""


class Forward(Protocol):
    """A model file's one public function."""

    def __call__(self, ops: Ops[X, W], spec: ModelSpec, weights: Mapping[str, W]) -> X:
        """Records or computes one step; `weights` is keyed by GGUF tensor name."""


SAMPLE_DTYPE = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<i4"),
        ("num_top", "<i4"),  # alternatives wanted: -1 none and no logprob, 0 the chosen only, up to MAX_TOP
        ("target", "<i4"),  # -1: sample; else report this token's logprob (prompt logprobs) and sample nothing
        ("choice", "<u4"),
        ("index", "<u4"),  # output index; with seed and choice it keys the random number
        ("reserved", "<u4"),
        ("seed", "<u8"),
    ]
)
"""One record per logit row; the C++ twin is `SampleParams` in native/sample.h (56 bytes, no padding)."""


@dataclass(slots=True)  # not frozen: one of 15 fields a step would take three times as long
class StepArrays:
    """One step, flat. T rows (tokens), S sequences, L logit rows; all int32 unless said, all C-contiguous.

    Ragged arrays are (starts, values): entry i is values[starts[i] : starts[i + 1]].
    """

    tokens: I32  # (T,)
    positions: I32  # (T,)
    slots: I32  # (T,) where the row's K/V go: block * block_size + position % block_size
    seq_starts: I32  # (S + 1,) rows of sequence s; rows of one sequence are consecutive positions
    table_starts: I32  # (S + 1,)
    block_tables: I32  # (sum,) ragged: every block up to the last position computed
    logit_rows: I32  # (L,) ascending row indices
    sample: npt.NDArray[Any]  # (L,) SAMPLE_DTYPE
    bias_starts: I32  # (L + 1,) ragged logit biases; -inf bans a token (min_tokens)
    bias_ids: I32
    bias_values: F32
    seen_starts: I32  # (L + 1,) ragged distinct tokens seen; empty without penalties
    seen_ids: I32
    seen_counts: I32  # times in the output; 0: in the prompt only
    want_logits: bool = False  # give back the raw logits too: tests and micro-benchmarks


@dataclass(slots=True)
class LogitResult:
    """What a step gives for its L logit rows. Log-probabilities are natural logs of softmax(raw logits)."""

    tokens: I32  # (L,) the sampled token, or the target
    logprobs: F32  # (L,) of that token
    top_ids: I32  # (L, MAX_TOP) most likely first, ties by lower id; -1 beyond num_top
    top_logprobs: F32  # (L, MAX_TOP)
    finite: npt.NDArray[np.bool_]  # (L,) False when a raw logit was NaN or infinite: tokens are then meaningless
    logits: F32 | None = None  # (L, vocab) when wanted
    seconds: float | None = None  # in the kernels, where the backend tells: less than the call takes
