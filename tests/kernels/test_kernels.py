"""The compiled kernels one by one, at every instruction set level, against the numpy specifications."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import _native
from chairlift import _native_testing as kernels
from chairlift.kernels import sampling
from chairlift.kernels.ops import F32, SAMPLE_DTYPE
from chairlift.kernels.reference import to_bf16
from chairlift.kernels.rounding import ActivationBits
from chairlift.models.quant import BLOCK, FORMATS, LARGEST, Quantised, bytes_of, decode, quantise_rows
from chairlift.models.spec import RawTensor

POOL = _native.Pool(2)
ISAS = _native.available_isas()
BLOCK_TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
LEVEL_LAYOUTS = ("w4", "w4_min", "w5", "w5_min", "w6", "w8")
FLOAT_TYPES = ["F32", "F16", "BF16"]
TYPES = BLOCK_TYPES + FLOAT_TYPES
EPS = 2.0**-23
HALF_FIELDS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's 16-bit floats stand, if not only at 0."""
MATMUL_SHAPES = [(1, 32), (16, 64), (37, 96), (200, 576), (21, 256), (40, 1536)]
WIDE_SHAPES = [shape for shape in MATMUL_SHAPES if shape[1] % 256 == 0]

each_isa = pytest.mark.parametrize("isa", ISAS)
each_type = pytest.mark.parametrize("kind", TYPES)
BITS: tuple[ActivationBits, ...] = (8, 16)


def block_of(kind: str) -> int:
    """Weights per block."""
    return FORMATS[kind].block


def at_least(cols: int, kind: str) -> int:
    """A width that is whole blocks."""
    return max(cols, block_of(kind))


def held(tensor: RawTensor) -> F32:
    """The weights with scales of 16 bits, as backends hold them."""
    numbers = decode(tensor)
    if isinstance(numbers, Quantised):
        return numbers.with_half_scales().dequantise().reshape(tensor.shape)
    return numbers


def random_tensor(kind: str, rows: int, cols: int, seed: int = 0) -> RawTensor:
    """A tensor of arbitrary levels (also those that no quantiser writes, as -128) and sane scales."""
    rng = np.random.default_rng([seed, rows, cols])
    if kind in BLOCK_TYPES:
        num_blocks = rows * cols // block_of(kind)
        blocks = rng.integers(0, 256, (num_blocks, bytes_of(kind, block_of(kind))), np.uint8)
        for start in HALF_FIELDS.get(kind, (0,)):
            halves = rng.normal(0, 0.02, num_blocks).astype(np.float16)
            blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
        data = blocks.reshape(-1)
    else:
        values = rng.normal(0, 1, rows * cols).astype(np.float32)
        if kind == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.astype({"F32": np.float32, "F16": np.float16}[kind]).view(np.uint8)
    return RawTensor(f"{kind} {rows}x{cols}", (rows, cols), kind, data)


def pack(*tensors: RawTensor, release_pages: bool = False) -> Any:
    parts = [(t.type_name, t.data, t.shape[0]) for t in tensors]
    return _native.pack(parts, tensors[0].shape[1], POOL, release_pages)


def multiply(
    isa: str, matrix: Any, x: F32, bits: ActivationBits, bias: F32 | None = None, residual: F32 | None = None
) -> F32:
    if matrix.layout in LEVEL_LAYOUTS:
        result: F32 = kernels.matmul_rounded(isa, matrix, quantise_rows(x, bits), bits, bias, residual)
    else:
        result = kernels.matmul_float(isa, matrix, x, bias, residual)
    return result


def exact(tensor: RawTensor, x: F32, bits: ActivationBits = 16) -> tuple[Any, Any]:
    """x @ w.T in float64 on the rounded activations, and the terms' summed magnitudes, which bound f32 rounding."""
    weights = decode(tensor)
    if not isinstance(weights, Quantised):
        w = weights.astype(np.float64)
        x = to_bf16(x) if tensor.type_name == "BF16" else x
        return x @ w.T, np.abs(x) @ np.abs(w).T
    weights = weights.with_half_scales()
    q, scale = quantise_rows(x, bits)
    scale = scale.repeat(BLOCK // weights.group, axis=1)
    blocks = q.reshape(len(q), -1, weights.group).astype(np.float64)
    levels = weights.q.astype(np.float64).reshape(len(weights.q), -1, weights.group) - weights.zero
    terms = np.einsum("tbk,nbk->tnb", blocks, levels) * weights.scale[None]
    sizes = np.abs(terms)
    if weights.offset is not None:
        minimum = weights.offset[None] * blocks.sum(axis=2)[:, None]
        terms, sizes = terms + minimum, sizes + np.abs(minimum)
    return (terms * scale[:, None]).sum(axis=2), (sizes * scale[:, None]).sum(axis=2)


def activations(rows: int, cols: int) -> F32:
    return np.random.default_rng(rows).normal(0, 1, (rows, cols)).astype(np.float32)


@each_isa
@each_type
def test_matmul_is_the_product(isa: str, kind: str) -> None:
    """A lane, nibble, block, panel or scale taken from the wrong place; a remainder of outputs that is dropped."""
    for outputs, cols in MATMUL_SHAPES if block_of(kind) < 256 else WIDE_SHAPES:
        tensor = random_tensor(kind, outputs, cols)
        x = activations(9, cols)
        for bits in BITS:
            expected, size = exact(tensor, x, bits)
            error = np.abs(multiply(isa, pack(tensor), x, bits) - expected)
            assert (error <= 8 * EPS * size).all(), (outputs, cols, bits)


@each_isa
@each_type
def test_a_row_does_not_depend_on_its_company(isa: str, kind: str) -> None:
    """A tile of several rows that adds in another order than a single row: the answer would depend on the load."""
    cols = at_least(160, kind)
    matrix = pack(random_tensor(kind, 40, cols))
    x = activations(33, cols)
    for bits in BITS:
        alone = np.concatenate([multiply(isa, matrix, x[i : i + 1], bits) for i in range(len(x))])
        for rows in [*range(1, 10), 33]:
            assert (multiply(isa, matrix, x[:rows], bits) == alone[:rows]).all()


@each_isa
@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_inputs_that_are_not_whole_blocks(isa: str, kind: str) -> None:
    """Float layouts have no blocks: the last few inputs of an odd width must count, once."""
    tensor = random_tensor(kind, 20, 39)
    x = activations(3, 39)
    expected, size = exact(tensor, x)
    assert (np.abs(multiply(isa, pack(tensor), x, 16) - expected) <= 8 * EPS * size).all()


@each_isa
@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_products_do_not_saturate(isa: str, kind: str, sign: int) -> None:
    """vpmaddubsw saturates on pairs of 8-bit products; 16-bit sums overflow."""
    cols = at_least(32, kind)
    data = np.full((16, bytes_of(kind, cols)), 0x7F if sign > 0 else 0x80, np.uint8)
    if kind != "Q8_0":
        data[:] = 0xFF if sign > 0 else 0
    data[:, :2] = np.array([1], np.float16).view(np.uint8)
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        data[:, 2:4] = 0
    if kind in ("Q4_K", "Q5_K"):
        data[:, 4:16] = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    if kind == "Q6_K":
        data[:, :2] = data[:, 2:4]
        data[:, 192:208] = 1
        data[:, 208:] = np.array([1], np.float16).view(np.uint8)
    tensor = RawTensor("extreme", (16, cols), kind, data.reshape(-1))
    assert len(np.unique(held(tensor))) == 1
    wide = [LARGEST, -LARGEST, LARGEST - 128, 128 - LARGEST]
    for bits, level in [(8, 254), (8, -254), *((16, level) for level in wide)]:
        q = np.zeros((1, cols), np.int16)
        q[0, -32:] = level
        scale = np.ones((1, cols // 32), np.float32)
        expected = held(tensor) @ q[0].astype(np.float32)
        assert (kernels.matmul_rounded(isa, pack(tensor), (q, scale), bits)[0] == expected).all()


@each_isa
@each_type
def test_bias_and_residual_are_added_in_this_order(isa: str, kind: str) -> None:
    """An epilogue that skips the remainder of a panel, or rounds otherwise than separate additions."""
    cols = at_least(64, kind)
    matrix = pack(random_tensor(kind, 21, cols))
    x = activations(9, cols)
    bias, residual = activations(1, 21)[0], activations(9, 21)
    for bits in BITS:
        plain = multiply(isa, matrix, x, bits)
        assert (multiply(isa, matrix, x, bits, bias) == plain + bias).all()
        assert (multiply(isa, matrix, x, bits, None, residual) == plain + residual).all()
        assert (multiply(isa, matrix, x, bits, bias, residual) == (plain + bias) + residual).all()


@each_isa
@each_type
def test_stacked_matrices_equal_separate_ones(isa: str, kind: str) -> None:
    """Sources that do not end on a panel of 16 rows would be mixed up (fused Q, K and V)."""
    cols = at_least(64, kind)
    parts = [random_tensor(kind, rows, cols, seed=rows) for rows in (9, 48, 3)]
    x = activations(4, cols)
    separate = np.concatenate([multiply(isa, pack(part), x, 8) for part in parts], axis=1)
    assert (multiply(isa, pack(*parts), x, 8) == separate).all()


@each_isa
@pytest.mark.parametrize(("kind", "other"), [("Q4_1", "Q4_K"), ("Q5_1", "Q5_K")])
def test_types_of_one_layout_stack(isa: str, kind: str, other: str) -> None:
    """A stack decoded by the type of its first part: a mixed file's Q in Q4_K beside K in Q4_1."""
    parts = [random_tensor(kind, 9, 256), random_tensor(other, 30, 256)]
    x = activations(3, 256)
    separate = np.concatenate([multiply(isa, pack(part), x, 8) for part in parts], axis=1)
    assert (multiply(isa, pack(*parts), x, 8) == separate).all()


@each_type
def test_embedded_rows_are_the_file_s_exactly(kind: str) -> None:
    """A decoder that fuses the offset's addition, or forgets the zero point, differs in the last bit or in all."""
    tensor = random_tensor(kind, 37, 96 if block_of(kind) <= 32 else 512)
    matrix = pack(tensor)
    rows = np.stack([kernels.embed_row(matrix, i) for i in range(37)])
    assert (rows.view(np.uint32) == held(tensor).view(np.uint32)).all()


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@pytest.mark.parametrize("cols", [1, 2, 39])
def test_embedded_rows_of_any_width(kind: str, cols: int) -> None:
    """Pairs of inputs: the last of an odd number, and what it is paired with."""
    tensor = random_tensor(kind, 37, cols)
    matrix = pack(tensor)
    rows = np.stack([kernels.embed_row(matrix, i) for i in range(37)])
    assert (rows == held(tensor)).all()


@each_isa
def test_rows_of_any_width_and_company(isa: str) -> None:
    """An odd input beside another row's: what a pair's second half is multiplied by must be 0, and the same for all."""
    for cols in (1, 2, 3, 39, 41):
        matrix = pack(random_tensor("BF16", 40, cols))
        x = activations(9, cols)
        x[3] = np.nan
        alone = np.concatenate([multiply(isa, matrix, x[i : i + 1], 16) for i in range(len(x))])
        assert np.array_equal(multiply(isa, matrix, x, 16), alone, equal_nan=True)
        assert np.isfinite(alone).all(axis=1).sum() == 8


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_every_half_float_decodes(kind: str) -> None:
    """Subnormals, infinities and zeros of both signs have code paths of their own."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    tensor = RawTensor("all", (1, 1 << 16), kind, halves.view(np.uint8))
    expected = held(tensor)[0]
    decoded = kernels.embed_row(pack(tensor), 0)
    assert np.array_equal(decoded, expected, equal_nan=True)
    assert (np.signbit(decoded) == np.signbit(expected))[~np.isnan(expected)].all()


@each_type
def test_packed_size(kind: str) -> None:
    """A layout that grows the weights costs every user memory and bandwidth: at most 1.15 x the file's bytes."""
    tensor = random_tensor(kind, 64, 768)
    assert tensor.data.size <= pack(tensor).nbytes <= 1.15 * tensor.data.size


def test_released_pages_leave_the_file_as_it_was(tmp_path: Path) -> None:
    """Giving back pages of a mapping must neither change what is read there nor what was packed from it."""
    tensor = random_tensor("Q4_0", 512, 4096)
    path = tmp_path / "weights"
    path.write_bytes(tensor.data.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapped = RawTensor(tensor.name, tensor.shape, tensor.type_name, np.frombuffer(mapping, np.uint8))
        released, kept = pack(mapped, release_pages=True), pack(tensor)
        assert mapped.data.tobytes() == tensor.data.tobytes()
        del mapped
    for row in (0, 255, 511):
        assert (kernels.embed_row(released, row) == kernels.embed_row(kept, row)).all()


def test_what_cannot_be_packed_is_refused() -> None:
    """Reading past a source, or half a block, instead of an error."""
    tensor = random_tensor("Q4_0", 16, 64)
    with pytest.raises(ValueError, match="bytes"):
        _native.pack([("Q4_0", tensor.data[:-1], 16)], 64, POOL, False)
    with pytest.raises(ValueError, match="32"):
        _native.pack([("Q4_0", tensor.data[: 16 * 18], 16)], 48, POOL, False)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.pack([("Q6_K", np.zeros(16 * 210, np.uint8), 16)], 288, POOL, False)
    with pytest.raises(ValueError, match="Q2_K"):
        _native.pack([("Q2_K", tensor.data, 16)], 64, POOL, False)
    with pytest.raises(ValueError, match="layout"):
        pack(tensor, random_tensor("Q8_0", 16, 64))


def test_an_unknown_level_is_named() -> None:
    """A forced level that this machine lacks must say so, not crash on an illegal instruction."""
    with pytest.raises(ValueError, match=r"neon.*portable"):
        multiply("neon", pack(random_tensor("F32", 1, 32)), activations(1, 32), 8)


# Sampling

NO_BIAS = (np.zeros(0, np.int32), np.zeros(0, np.float32))
NO_SEEN = (np.zeros(0, np.int32), np.zeros(0, np.int32))
SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 100_000},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1e-3, "top_p": 0.999},
    {"temperature": 1e6, "top_p": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.0, "repetition_penalty": 0.5, "presence_penalty": -1.0},
    {"temperature": 1.0, "target": 3},
]
ROWS = {
    "one token": np.array([2.5], np.float32),
    "few": np.random.default_rng(1).normal(0, 2, 13).astype(np.float32),
    "flat": np.random.default_rng(2).normal(0, 1, 3000).astype(np.float32),
    "spread": np.random.default_rng(3).normal(0, 4, 5003).astype(np.float32),
    "ties": np.random.default_rng(4).integers(-3, 4, 1000).astype(np.float32),
    "all equal": np.full(500, -7.25, np.float32),
    "large": np.random.default_rng(5).normal(0, 3, 49152).astype(np.float32) * 2,
}


def record(**fields: float) -> Any:
    row = np.zeros(1, SAMPLE_DTYPE)
    for name, value in {"top_p": 1.0, "repetition_penalty": 1.0, "target": -1, "num_top": 20, **fields}.items():
        row[name] = value
    return row


def both(isa: str, logits: F32, row: Any, bias: Any = NO_BIAS, seen: Any = NO_SEEN) -> tuple[Any, sampling.Choice]:
    native = kernels.reduce_logits(isa, logits, row.view(np.uint8), bias, seen)
    return sampling.Choice(*native), sampling.reduce_logits(logits, row[0], bias, seen)


def assert_same(native: sampling.Choice, reference: sampling.Choice) -> None:
    assert (native.token, native.finite) == (reference.token, reference.finite)
    assert native.logprob == pytest.approx(reference.logprob, abs=1e-5)
    assert native.top_ids.tolist() == reference.top_ids.tolist()
    assert native.top_logprobs == pytest.approx(reference.top_logprobs, abs=1e-5)


@each_isa
@pytest.mark.parametrize("name", ROWS)
def test_sampling_is_its_specification(isa: str, name: str) -> None:
    """Any difference in what a knob keeps, in ranks, ties, the draw or log-probabilities."""
    logits = ROWS[name]
    rng = np.random.default_rng(6)
    for number, fields in enumerate(SETTINGS):
        for index in range(2 if len(logits) > 10_000 else 6):
            row = record(**{**fields, "target": min(fields.get("target", -1), len(logits) - 1)})
            row["seed"], row["choice"], row["index"] = 1 << 40 | number, index % 2, index
            count = min(len(logits), 7)
            bias = (rng.choice(len(logits), count).astype(np.int32), rng.normal(0, 2, count).astype(np.float32))
            seen_ids = rng.choice(len(logits), count, replace=False).astype(np.int32)
            seen = (seen_ids, rng.integers(0, 4, count).astype(np.int32)) if "penalty" in str(fields) else NO_SEEN
            assert_same(*both(isa, logits, row, bias if index % 2 else NO_BIAS, seen))


@each_isa
@pytest.mark.parametrize("num_top", [-1, 0, 1, 5, 20])
def test_alternatives_wanted(isa: str, num_top: int) -> None:
    """More or fewer alternatives than asked for, or a log-probability that nobody wanted to pay for."""
    for fields in ({"temperature": 1.0}, {"target": 2}):
        for name in ("few", "ties", "spread"):
            assert_same(*both(isa, ROWS[name], record(**fields, num_top=num_top)))


@each_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 16, 40])
def test_a_row_that_is_not_finite_is_flagged(isa: str, bad: float, place: int) -> None:
    """A NaN in a vector's lane or in the remainder that goes unseen becomes a token."""
    logits = np.zeros(41, np.float32)
    logits[place] = bad
    for target in (-1, 5):
        native, reference = both(isa, logits, record(temperature=1.0, target=target))
        assert not native.finite
        assert_same(native, reference)


@each_isa
@pytest.mark.parametrize("fields", [{"repetition_penalty": np.nan}, {"presence_penalty": -np.inf}, {}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjustments_that_make_a_nan_are_flagged(isa: str, fields: Mapping[str, float], temperature: float) -> None:
    """A NaN weight has no bin: it was counted beyond the histogram's end, over whatever memory lay there."""
    bias = (np.array([4], np.int32), np.array([-np.inf if fields else np.nan], np.float32))
    seen = (np.array([4], np.int32), np.array([1], np.int32))
    native, reference = both(isa, ROWS["few"], record(temperature=temperature, **fields), bias, seen)
    assert not native.finite
    assert_same(native, reference)


@each_isa
def test_banned_tokens(isa: str) -> None:
    """A ban must hold for greedy and drawn tokens; a row with every token banned is flagged."""
    logits = ROWS["few"]
    for banned in (1, 6, 12, 13):
        order = sampling.descending(logits)[:banned].astype(np.int32)
        bias = (order, np.full(banned, -np.inf, np.float32))
        for fields in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9}):
            native, reference = both(isa, logits, record(**fields, seed=banned), bias)
            assert_same(native, reference)
            assert native.finite == (banned < 13)


@each_isa
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}, {"top_k": 5}], ids=str)
def test_draws_follow_the_same_distribution(isa: str, fields: Mapping[str, float]) -> None:
    """A bin that is never reached, or entered at the wrong place, shows over many draws."""
    logits = ROWS["few"]
    for index in range(500):
        native, reference = both(isa, logits, record(temperature=1.5, **fields, index=index, seed=9, num_top=-1))
        assert native.token == reference.token


def test_the_random_number_is_the_same() -> None:
    """A twin with another generator gives other texts for the same seed."""
    for seed in (0, 1, 2**32 - 1, 2**64 - 1, 0xA4093822299F31D0):
        for choice, index in ((0, 0), (1, 0), (0, 1), (2**32 - 1, 2**32 - 1)):
            assert kernels.uniform(seed, choice, index) == sampling.uniform(seed, choice, index)
