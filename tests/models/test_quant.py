"""Weight formats against the `gguf` package, bit for bit; the activation rounding against its definition."""

from __future__ import annotations

from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chairlift.errors import ModelError
from chairlift.models import quant
from chairlift.models.gguf import GGML_TYPES, GGUFFile
from chairlift.models.quant import FORMATS, LARGEST, Quantised, bytes_of, decode, dequantise, quantise_rows
from chairlift.models.spec import RawTensor
from conftest import TinyGGUF
from support.tiny_gguf import WEIGHT_TYPES
from support.weight_encoders import ENCODERS

F32 = npt.NDArray[np.float32]
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
HALF_FIELDS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's 16-bit floats stand, if not only at 0."""
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
HALVES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], dtype="<u2")
"""16-bit floats at the edges: zeros, denormals, the least normal, ones, the largest of both signs."""


def raw(kind: str, shape: tuple[int, ...], data: bytes, name: str = "blk.0.ffn_up.weight") -> RawTensor:
    return RawTensor(name, shape, kind, np.frombuffer(data, dtype=np.uint8))


def bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def theirs(tensor: RawTensor) -> F32:
    rows = tensor.data.reshape(tensor.num_elements // tensor.shape[-1], -1)
    kind = gguf.GGMLQuantizationType[tensor.type_name]
    result: F32 = gguf.quants.dequantize(np.ascontiguousarray(rows), kind).reshape(tensor.shape)
    return result


def block_of(kind: str) -> int:
    return FORMATS[kind].block


def random_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> bytes:
    """Random quants under scales (and offsets) that include every edge of a 16-bit float."""
    size = bytes_of(kind, block_of(kind))
    blocks = rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    for start in HALF_FIELDS.get(kind, (0,)):
        finite = rng.standard_normal(num_blocks).astype("<f2").view("<u2")
        edges = rng.choice(HALVES, num_blocks)
        halves = np.where(rng.random(num_blocks) < 0.5, finite, edges)
        blocks[:, start : start + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_block_types_equal_the_gguf_package_bit_for_bit(kind: str) -> None:
    """Guards against swapped nibbles, a wrong zero point and an operation rounded in another order."""
    rng = np.random.default_rng(7)
    tensor = raw(kind, (64, 3 * block_of(kind)), random_blocks(kind, 64 * 3, rng))
    assert (bits(dequantise(tensor)) == bits(theirs(tensor))).all()


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if not kind.endswith("_K")])
def test_what_the_gguf_package_quantises_reads_back(kind: str) -> None:
    """Guards against bytes of a real quantiser that random ones do not resemble; it has none for K formats."""
    weights = np.random.default_rng(5).standard_normal((16, 256)).astype(np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    tensor = raw(kind, weights.shape, data.tobytes())
    assert (bits(dequantise(tensor)) == bits(theirs(tensor))).all()
    assert np.abs(dequantise(tensor) - weights).max() < 0.5


def test_half_scales_are_within_half_a_unit_of_the_file_s() -> None:
    """Guards against a loss beyond the rounding of a scale to 16 bits, and against any where the file has 16 bits."""
    rng = np.random.default_rng(11)
    for kind in BLOCK_TYPES:
        numbers = decode(raw(kind, (64, 256), ENCODERS[kind](rng.standard_normal((64, 256)).astype(np.float32))))
        assert isinstance(numbers, Quantised)
        held = numbers.with_half_scales()
        assert held.zero == numbers.zero
        assert (held.q == numbers.q).all()
        changed = 2.0**-11 if kind.endswith("_K") else 0.0
        assert (np.abs(held.scale - numbers.scale) <= changed * np.abs(numbers.scale)).all()
        assert (held.offset is None) == (numbers.offset is None)
        if held.offset is not None and numbers.offset is not None:
            assert (np.abs(held.offset - numbers.offset) <= changed * np.abs(numbers.offset)).all()


@pytest.mark.parametrize(("kind", "width"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_float_types_equal_the_gguf_package_bit_for_bit(kind: str, width: int) -> None:
    """Guards against a lost sign of zero, flushed denormals and mangled infinities; NaNs stay NaNs."""
    data = np.arange(0, 2**16, dtype="<u2")
    if width == 4:
        data = np.random.default_rng(1).integers(0, 2**16, 2**17, dtype="<u2")
    tensor = raw(kind, (256, 256), data.tobytes())
    with np.errstate(invalid="ignore"):
        mine, expected = dequantise(tensor), theirs(tensor)
    assert (np.isnan(mine) == np.isnan(expected)).all()
    assert (bits(mine) == bits(expected))[~np.isnan(expected)].all()
    assert {0x80000000, 0x7F800000, 0xFF800000} <= set(bits(mine).ravel().tolist()) or kind == "F32"


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_a_written_file_reads_back_close_to_what_went_in(kind: str, tiny_gguf: TinyGGUF) -> None:
    """Guards against a decoder and a test writer that agree with each other but not with the numbers."""
    weights = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    mine = dequantise(raw(kind, weights.shape, ENCODERS[kind](weights)))
    spread = np.abs(weights).max()
    tolerance = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127}
    tolerance |= {
        "Q4_0": 1 / 8,
        "Q4_1": 1 / 15,
        "Q5_0": 1 / 16,
        "Q5_1": 1 / 31,
        "Q4_K": 1 / 14,
        "Q5_K": 1 / 30,
        "Q6_K": 1 / 30,
    }
    assert np.abs(mine - weights).max() <= tolerance[kind] * spread
    with GGUFFile.open(tiny_gguf(weight_type=kind)) as file:
        for tensor in file.tensors.values():
            assert dequantise(tensor).shape == tensor.shape


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_quantised_fields_have_the_promised_meaning(kind: str) -> None:
    """Guards against kernels that read q, scale, offset and zero otherwise than `dequantise` does."""
    cols = 2 * block_of(kind)
    tensor = raw(kind, (2, 5, cols), random_blocks(kind, 20, np.random.default_rng(9)))
    numbers = decode(tensor)
    assert isinstance(numbers, Quantised)
    assert numbers.q.shape == (10, cols)
    assert numbers.group == (16 if kind == "Q6_K" else 32)
    assert numbers.scale.shape == (10, cols // numbers.group)
    assert numbers.q.dtype == (np.int8 if kind == "Q8_0" else np.uint8)
    assert (numbers.offset is not None) == (kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    assert numbers.zero == ZEROS.get(kind, 0)
    scale = numbers.scale.repeat(numbers.group, axis=1)
    weights = scale * (numbers.q.astype(np.float32) - np.float32(numbers.zero))
    if numbers.offset is not None:
        weights = weights + numbers.offset.repeat(numbers.group, axis=1)
    assert (bits(weights.reshape(2, 5, cols)) == bits(theirs(tensor))).all()


def test_infinite_scales_raise_no_warning() -> None:
    """Guards against a numpy warning (an error in tests) where a NaN in the logits should tell."""
    for kind in ("Q4_1", "Q4_K"):
        block = np.full(bytes_of(kind, 256), 0x88, dtype=np.uint8)
        block.reshape(-1, 20 if kind == "Q4_1" else 144)[:, :4] = np.array([0x7C00, 0xFC00], "<u2").view(np.uint8)
        tensor = raw(kind, (1, 256), block.tobytes())
        assert not np.isfinite(dequantise(tensor)).any()
        numbers = decode(tensor)
        assert isinstance(numbers, Quantised)
        assert not np.isfinite(numbers.with_half_scales().dequantise()).any()


def test_type_table_equals_the_gguf_package() -> None:
    """Guards against a wrong block size, by which an extent check would let a short file pass."""
    stale = {"Q8_1"}  # the package says 40 bytes; ggml's block_q8_1 has two 16-bit floats and 32 bytes; never in files
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name not in stale:
            assert GGML_TYPES[int(kind)] == (kind.name, *sizes)
    assert quant.supported_types() == ["F32", "F16", "BF16", *BLOCK_TYPES]


def test_bytes_of() -> None:
    """Guards against a planner that counts bytes otherwise than the reader."""
    assert bytes_of("Q4_K", 512) == 288
    assert bytes_of("F16", 3) == 6
    with pytest.raises(ModelError, match="33 weights are not whole blocks of 32"):
        bytes_of("Q8_0", 33)
    with pytest.raises(ModelError, match="'Q9' is not known"):
        bytes_of("Q9", 32)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (raw("Q2_K", (1, 256), bytes(84)), "'blk.0.ffn_up.weight' has weight type Q2_K, which is not supported.*Q4_1"),
        (raw("I8", (4,), bytes(4)), "weight type I8"),
        (raw("Q4_0", (2, 48), bytes(54)), "rows of 48 are not whole blocks of 32"),
        (raw("Q6_K", (2, 96), bytes(158)), "rows of 96 are not whole blocks of 256, as Q6_K needs"),
        (raw("Q4_0", (2, 32), bytes(18)), r"has 18 bytes; Q4_0 of shape \(2, 32\) needs 36"),
        (raw("F32", (), b""), "is empty"),
        (raw("F32", (4, 0), b""), "is empty"),
    ],
)
def test_what_cannot_be_decoded_names_the_tensor(tensor: RawTensor, expected: str) -> None:
    """Guards against a reshape error from numpy where the user must learn which tensor and why."""
    with pytest.raises(ModelError, match=expected):
        decode(tensor)


ROWS = hnp.arrays(np.float32, (3, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32))


BITS = st.sampled_from((8, 16))


@settings(max_examples=150, deadline=None)
@given(ROWS, BITS)
def test_quantise_rows_is_its_definition(x: F32, bits: Literal[8, 16]) -> None:
    """Guards against a changed rounding: the native kernel does the same operations one lane at a time."""
    levels, scale = quantise_rows(x, bits)
    assert (levels.shape, scale.shape) == ((3, 64), (3, 2))
    assert (levels.dtype, scale.dtype) == (np.dtype(np.int16), np.dtype(np.float32))
    zero, half = np.float32(0), np.float32(0.5)
    for row in range(3):
        for block in range(2):
            lanes = x[row, 32 * block : 32 * block + 32]
            top, bottom = max(zero, lanes.max()), min(zero, lanes.min())
            width, steps = (top - bottom, np.float32(254)) if bits == 8 else (max(top, -bottom), np.float32(127 * 256))
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                inverse = steps / width
                inverse = inverse if np.isfinite(inverse) else zero
                offset = int(np.rint((top + bottom) * half * inverse))
            expected = [int(np.rint(lane * inverse)) for lane in lanes]
            if bits == 8:
                expected = [min(127, max(-127, level - offset)) + offset for level in expected]
            assert scale[row, block] == width / steps
            assert levels[row, 32 * block : 32 * block + 32].tolist() == expected


@settings(max_examples=100, deadline=None)
@given(ROWS, BITS)
def test_quantise_rows_error_and_independence(x: F32, bits: Literal[8, 16]) -> None:
    """Guards against a lane off by more than half a step, and against a row that depends on its neighbours."""
    levels, scale = quantise_rows(x, bits)
    blocks = levels.reshape(3, 2, 32)
    assert (blocks.max(axis=2) - blocks.min(axis=2) <= (254 if bits == 8 else 2 * LARGEST)).all()
    assert (np.abs(levels) <= (254 if bits == 8 else LARGEST)).all()
    step = scale.repeat(32, axis=1).astype(np.float64)
    # The ends of an 8-bit range may lie half a step beyond the byte that stands for them.
    assert (np.abs(levels * step - x) <= (1.01 if bits == 8 else 0.505) * step + 2.0**-112).all()
    for row in range(3):
        alone, alone_scale = quantise_rows(x[row : row + 1], bits)
        assert (alone == levels[row]).all()
        assert (alone_scale == scale[row]).all()


@pytest.mark.parametrize(("bits", "top", "bottom"), [(8, 127, -127), (8, 254, 0), (8, 0, -254), (16, LARGEST, 0)])
def test_quantise_rows_edges(bits: Literal[8, 16], top: int, bottom: int) -> None:
    """Guards against rounding half away from zero, steps for a sign that no lane has, garbage from denormals."""
    x = np.zeros((5, 32), dtype=np.float32)
    sign = 1 if top else -1
    x[1, :6] = [top, bottom, 0.5 * sign, 1.5 * sign, 2.5 * sign, 0]
    x[2] = 1e-45
    x[3, 0] = np.inf
    x[4, 0] = np.nan
    levels, scale = quantise_rows(x, bits)
    assert levels[1, :6].tolist() == [top, bottom, 0, 2 * sign, 2 * sign, 0]
    assert not levels[[0, 2, 3, 4]].any()
    assert (scale[0, 0], scale[1, 0]) == (0, 1)
    assert not np.isfinite(scale[3:, 0]).any()
    with pytest.raises(ModelError, match="width 33"):
        quantise_rows(np.zeros((1, 33), dtype=np.float32), bits)
