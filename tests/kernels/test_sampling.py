"""The sampling specification: what each knob keeps, who wins ties, and that draws follow the distribution."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.ops import F32, MAX_TOP, SAMPLE_DTYPE
from chairlift.kernels.sampling import Choice, adjust, candidates, log_softmax, philox4x32, reduce_logits, uniform

NONE_I = np.zeros(0, np.int32)
NONE_F = np.zeros(0, np.float32)
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "target": -1, "num_top": -1}


def record(**fields: float) -> Any:
    """One SAMPLE_DTYPE element: neutral and greedy but for the fields given."""
    row = np.zeros(1, SAMPLE_DTYPE)[0]
    for name, value in {**NEUTRAL, **fields}.items():
        row[name] = value
    return row


def row(*logits: float) -> F32:
    return np.array(logits, np.float32)


def reduce(
    logits: F32,
    fields: Mapping[str, float],
    *,
    bias: Mapping[int, float] = MappingProxyType({}),
    seen: Mapping[int, int] = MappingProxyType({}),
) -> Choice:
    return reduce_logits(
        logits,
        record(**fields),
        (np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)),
        (np.array(list(seen), np.int32), np.array(list(seen.values()), np.int32)),
    )


def draws(logits: F32, count: int, **fields: float) -> npt.NDArray[np.int_]:
    """How often each token is drawn over output indices 0..count-1."""
    tokens = [reduce(logits, {"temperature": 1.0, **fields, "index": i}).token for i in range(count)]
    return np.bincount(tokens, minlength=len(logits))


def kept(scaled: F32, **fields: float) -> list[int]:
    return [int(token) for token in candidates(scaled - scaled.max(), record(**fields))[0]]


def test_philox_gives_the_published_vectors() -> None:
    """A wrong round, key schedule or word order: numbers that no twin could reproduce (Random123's kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_keyed_by_seed_choice_and_index() -> None:
    """A key that leaves one of them out, or only the seed's low half: repeated answers for n > 1 or large seeds."""
    base = uniform(1, 2, 3)
    assert base == (philox4x32((3, 2, 0, 0), (1, 0))[0] >> 8) / 2**24
    assert len({base, uniform(0, 2, 3), uniform(1, 0, 3), uniform(1, 2, 0), uniform(1 + (1 << 32), 2, 3)}) == 5
    many = np.array([uniform(7, 0, i) for i in range(4000)])
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / 4000) ** 0.5


def test_draws_follow_the_softmax() -> None:
    """A draw that is not the inverse CDF of the tempered softmax: chi-square, 9 degrees (p < 2e-4 at 33)."""
    logits = row(0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 1.5, 0.25, -2.0, 0.75)
    for temperature in (1.0, 0.7):
        expected = np.exp(logits / temperature)
        expected = expected / expected.sum() * 6000
        observed = draws(logits, 6000, temperature=temperature, seed=99)
        assert ((observed - expected) ** 2 / expected).sum() < 33


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    """Ties broken by memory order or by the random number: text that changes between machines."""
    assert reduce(row(1, 3, 2, 3), {}).token == 1
    assert reduce(row(-5, -5, -5), {"seed": 12}).token == 0


def test_top_k_keeps_the_lower_ids_of_equals() -> None:
    """A partial sort that keeps an arbitrary one of two equal logits."""
    logits = row(1, 2, 2, 2, 0)
    assert kept(logits, top_k=2) == [1, 2]
    assert kept(logits, top_k=4) == [1, 2, 3, 0]
    assert kept(logits, top_k=0) == kept(logits, top_k=5) == kept(logits, top_k=50) == [1, 2, 3, 0, 4]
    assert (draws(logits, 300, top_k=1) == [0, 300, 0, 0, 0]).all()


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    """Off by one at a boundary that is met exactly, an empty set for a tiny top_p, a tail lost to rounding at 1."""
    logits = np.log(row(0.5, 0.25, 0.125, 0.125))
    assert kept(logits, top_p=0.0) == kept(logits, top_p=1e-6) == kept(logits, top_p=0.49) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.8) == [0, 1, 2]
    assert kept(logits, top_p=0.9) == [0, 1, 2, 3]
    assert kept(row(2, 2, 2, 2), top_p=0.5) == [0, 1]
    assert kept(row(0, 60, -40), top_p=1.0) == [1, 0, 2]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """top_p over the full distribution: with top_k in force it would then never cut anything."""
    logits = np.log(row(0.3, 0.2, 0.2, 0.2, 0.1))
    assert kept(logits, top_k=2, top_p=0.55) == [0]
    assert kept(logits, top_k=2, top_p=0.65) == [0, 1]


def test_min_p_is_relative_to_the_most_likely() -> None:
    """min_p as an absolute probability, or one that can leave nothing."""
    logits = np.log(row(0.4, 0.2, 0.1, 0.3))
    assert kept(logits, min_p=0.4) == [0, 3, 1]
    assert kept(logits, min_p=1.0) == [0]
    assert kept(row(7, 7, 1), min_p=1.0) == [0, 1]


def test_penalties_are_those_of_their_papers() -> None:
    """Repetition that favours a negative logit, presence for a prompt token, frequency not counted."""
    logits = row(2, -2, 2, -2, 1)
    seen = (np.array([0, 1, 2, 3], np.int32), np.array([0, 0, 3, 1], np.int32))
    none = (NONE_I, NONE_F)
    repeated = adjust(logits, record(repetition_penalty=2.0), none, seen)
    assert repeated.tolist() == [1, -4, 1, -4, 1]
    counted = adjust(logits, record(presence_penalty=0.5, frequency_penalty=0.25), none, seen)
    assert counted.tolist() == [2, -2, 0.75, -2.75, 1]
    biased = adjust(logits, record(repetition_penalty=2.0), (np.array([1], np.int32), row(4)), seen)
    assert biased.tolist() == [1, 1, 1, -4, 1], "the bias is added before the penalty"
    assert logits.tolist() == [2, -2, 2, -2, 1], "the raw logits are someone else's"


def test_a_banned_token_is_never_drawn_or_taken() -> None:
    """A ban that a high temperature or top_p = 1 lets through (min_tokens must keep EOS out)."""
    logits = row(9, 1, 0)
    assert reduce(logits, {}, bias={0: -np.inf}).token == 1
    hot = {reduce(logits, {"temperature": 50, "index": i}, bias={0: -np.inf}).token for i in range(300)}
    assert hot == {1, 2}
    assert not reduce(logits, {"temperature": 1}, bias={0: -np.inf, 1: -np.inf, 2: -np.inf}).finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 40])
def test_a_row_that_is_not_finite_is_flagged(bad: float, place: int) -> None:
    """NaN that compares false everywhere and quietly becomes token 0 of a healthy-looking answer."""
    logits = np.zeros(41, np.float32)
    logits[place] = bad
    for target in (-1, 3):
        choice = reduce(logits, {"temperature": 1, "target": target, "num_top": 2})
        assert not choice.finite
        assert (choice.top_ids == -1).all()


def test_logprobs_are_of_the_raw_logits() -> None:
    """Log-probabilities after temperature, bias or top_k: not what the model said."""
    logits = row(1, 2, 3, 2)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    fields = {"temperature": 0.1, "top_k": 1, "presence_penalty": 2, "num_top": 3}
    choice = reduce(logits, fields, bias={2: -50}, seen={1: 9})
    assert choice.token == 3
    assert choice.logprob == pytest.approx(expected[3], abs=1e-6)
    assert choice.top_ids.tolist() == [2, 1, 3] + [-1] * (MAX_TOP - 3)
    assert choice.top_logprobs[:3] == pytest.approx(expected[[2, 1, 3]], abs=1e-6)


def test_a_target_is_reported_and_nothing_is_sampled() -> None:
    """Prompt log-probabilities that report the argmax instead of the prompt's own token."""
    logits = row(1, 2, 3)
    for num_top in (-1, 0, 1):
        choice = reduce(logits, {"target": 0, "num_top": num_top})
        assert (choice.token, choice.logprob) == (0, log_softmax(logits)[0])
        assert (choice.top_ids >= 0).sum() == max(num_top, 0)


def test_fewer_tokens_than_alternatives_wanted() -> None:
    """A vocabulary smaller than num_top: an index error, or ids made up."""
    assert reduce(row(1, 2), {"num_top": MAX_TOP}).top_ids.tolist() == [1, 0] + [-1] * (MAX_TOP - 2)


def test_extreme_numbers_give_a_token() -> None:
    """Overflow in logits / temperature: inf - inf is NaN, and then no token at all."""
    logits = row(3e38, -3e38, 1e38)
    for temperature in (1e-30, 1e-6, 1.0, 100.0):
        choice = reduce(logits, {"temperature": temperature, "num_top": 3})
        assert (choice.token, choice.finite) == (0, True)
        assert choice.top_logprobs[0] == 0


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 4.0]), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    index=st.integers(0, 2**32 - 1),
)
def test_the_draw_is_always_a_candidate(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, index: int
) -> None:
    """A rounding edge that draws outside the kept set, or a kept set that is empty, unordered or not a prefix."""
    values = np.array(logits, np.float32)
    fields = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    scaled = (values - values.max()) / np.float32(temperature)
    ids = candidates(scaled, record(**fields))[0].tolist()
    ranked = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    assert len(ids) >= 1
    assert ids == ranked[: len(ids)]
    assert reduce(values, {**fields, "index": index}).token in ids
