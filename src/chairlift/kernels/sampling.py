"""How a row of logits becomes a token: the numpy specification, which the compiled twin must agree with.

Order: finite check and log-probabilities on the raw logits; bias; penalties; then either the largest, or temperature,
min_p, top_k, top_p and one draw. Wherever tokens are ranked, equal values rank by lower id, so that no result depends
on how a sort breaks ties.

Precision: adjusted logits are float32, each operation rounded as written; exponentials and sums are float64 here. A
twin that sums in float32 differs only where the draw falls within rounding of a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.kernels.ops import F32, I32, MAX_TOP

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

_MASK = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in 32 bits


@dataclass(frozen=True, slots=True)
class Choice:
    """What one logit row gives; the fields are a row of `LogitResult`."""

    token: int
    logprob: float
    top_ids: I32  # (MAX_TOP,) -1 beyond what was asked for
    top_logprobs: F32  # (MAX_TOP,) 0 beyond what was asked for
    finite: bool


@np.errstate(over="ignore", invalid="ignore")  # -inf is the right end of an overflow; what is worse is flagged
def reduce_logits(logits: F32, record: Any, bias: tuple[I32, F32], seen: tuple[I32, I32]) -> Choice:
    """Chooses a token from raw logits (V,), or reports the target's log-probability when the record names one.

    `record` is one element of SAMPLE_DTYPE; `bias` is (ids, values to add); `seen` is (distinct ids, times in the
    output). A row that is not finite, or has every token banned, gives token 0 (or the target) and `finite=False`.
    """
    top_ids = np.full(MAX_TOP, -1, np.int32)
    top_logprobs = np.zeros(MAX_TOP, np.float32)
    target, num_top = int(record["target"]), int(record["num_top"])
    if not np.isfinite(logits).all():
        return Choice(max(target, 0), 0.0, top_ids, top_logprobs, finite=False)

    token = target
    if target < 0:
        adjusted = adjust(logits, record, bias, seen)
        if not np.isfinite(adjusted.max()):
            return Choice(0, 0.0, top_ids, top_logprobs, finite=False)
        token = choose(adjusted, record)
    if target < 0 and num_top < 0:
        return Choice(token, 0.0, top_ids, top_logprobs, finite=True)

    logprobs = log_softmax(logits)
    top = descending(logits)[: max(num_top, 0)]
    top_ids[: len(top)] = top
    top_logprobs[: len(top)] = logprobs[top]
    return Choice(token, float(logprobs[token]), top_ids, top_logprobs, finite=True)


def log_softmax(logits: F32) -> F32:
    """log(exp(l) / sum(exp(l))), (V,): summed in float64, rounded once."""
    shifted: F64 = logits.astype(np.float64) - logits.max()
    result: F32 = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return result


def adjust(logits: F32, record: Any, bias: tuple[I32, F32], seen: tuple[I32, I32]) -> F32:
    """Bias, then penalties, in float32 (V,).

    Repetition divides a positive logit and multiplies a negative one, for all seen tokens (Keskar et al. 2019);
    presence and frequency are subtracted for those seen in the output, as OpenAI defines them.
    """
    adjusted = logits.copy()
    np.add.at(adjusted, *bias)
    ids, counts = seen
    repetition, presence, frequency = (
        np.float32(record[f"{name}_penalty"]) for name in ("repetition", "presence", "frequency")
    )
    values = adjusted[ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - np.where(counts > 0, presence + frequency * counts.astype(np.float32), np.float32(0))
    adjusted[ids] = values
    return adjusted


def choose(adjusted: F32, record: Any) -> int:
    """The token for adjusted logits (V,) of which at least one is finite."""
    temperature = np.float32(record["temperature"])
    if temperature == 0:
        return int(adjusted.argmax())  # numpy gives the first of equals
    scaled = (adjusted - adjusted.max()) / temperature  # shifted first: no temperature overflows the largest
    ids, probabilities = candidates(scaled, record)
    cumulative = np.cumsum(probabilities)
    draw = uniform(int(record["seed"]), int(record["choice"]), int(record["index"])) * cumulative[-1]
    return int(ids[np.searchsorted(cumulative, draw, side="right")])


def candidates(scaled: F32, record: Any) -> tuple[Ids, F64]:
    """The tokens that may be drawn, most likely first, and their probabilities relative to the most likely's.

    `scaled` is (V,) with maximum 0. min_p keeps what is at least min_p times as likely as the most likely token; top_k
    the k most likely of these; top_p the fewest of these that hold top_p of what is left, and at least one.
    """
    ids = descending(scaled)
    probabilities = np.exp(scaled[ids].astype(np.float64))
    keep = int((probabilities >= record["min_p"]).sum())  # a prefix, as they descend; a banned token has 0 >= 0
    top_k = int(record["top_k"])
    if top_k > 0:
        keep = min(keep, top_k)
    ids, probabilities = ids[: max(keep, 1)], probabilities[: max(keep, 1)]
    top_p = float(record["top_p"])
    if top_p < 1:  # at 1 rounding of the sum must not drop a tail
        cumulative = np.cumsum(probabilities)
        last = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left"))
        ids, probabilities = ids[: last + 1], probabilities[: last + 1]
    return ids, probabilities


def descending(values: F32) -> Ids:
    """Ids from the largest value to the smallest, equal values by lower id."""
    return np.argsort(-values, kind="stable")


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) of one output token: 24 bits, a multiple of 2^-24, exact in float32."""
    words = philox4x32((index & _MASK, choice & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return (words[0] >> 8) * 2.0**-24


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four 32-bit words."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _PHILOX_MULTIPLIERS[0] * x0, _PHILOX_MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> 32) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _MASK, (k1 + _PHILOX_WEYL[1]) & _MASK
    return x0, x1, x2, x3
