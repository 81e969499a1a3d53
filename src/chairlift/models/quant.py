"""Weight formats: how many bytes they take, and what numbers they stand for. The numpy specification of every one.

Block formats are GGML's (ggml-common.h): a row is cut into blocks of consecutive weights, each with its own scale.
Knows no container (`RawTensor` is all that it sees), and not the packed layouts of the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.errors import ModelError
from chairlift.models.spec import RawTensor
from chairlift.text import quoted_list

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]

BLOCK = 32
"""Activations per scale, and weights per scale in most formats."""
LARGEST = 127 * 256
"""The level of a block's largest activation in 16 bits. Its two bytes are 127 and 0, so 8-bit products do the work."""
STEPS = 254
"""Steps between the smallest and the largest level of a block in 8 bits."""


class WeightFormat(NamedTuple):
    """How a row is cut into blocks: `block_bytes` hold `block` consecutive weights."""

    name: str
    block: int
    block_bytes: int


FORMATS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        WeightFormat("F32", 1, 4),
        WeightFormat("F16", 1, 2),
        WeightFormat("Q4_0", 32, 18),
        WeightFormat("Q4_1", 32, 20),
        WeightFormat("Q5_0", 32, 22),
        WeightFormat("Q5_1", 32, 24),
        WeightFormat("Q8_0", 32, 34),
        WeightFormat("Q8_1", 32, 36),
        WeightFormat("Q2_K", 256, 84),
        WeightFormat("Q3_K", 256, 110),
        WeightFormat("Q4_K", 256, 144),
        WeightFormat("Q5_K", 256, 176),
        WeightFormat("Q6_K", 256, 210),
        WeightFormat("Q8_K", 256, 292),
        WeightFormat("IQ2_XXS", 256, 66),
        WeightFormat("IQ2_XS", 256, 74),
        WeightFormat("IQ3_XXS", 256, 98),
        WeightFormat("IQ1_S", 256, 50),
        WeightFormat("IQ4_NL", 32, 18),
        WeightFormat("IQ3_S", 256, 110),
        WeightFormat("IQ2_S", 256, 82),
        WeightFormat("IQ4_XS", 256, 136),
        WeightFormat("I8", 1, 1),
        WeightFormat("I16", 1, 2),
        WeightFormat("I32", 1, 4),
        WeightFormat("I64", 1, 8),
        WeightFormat("F64", 1, 8),
        WeightFormat("IQ1_M", 256, 56),
        WeightFormat("BF16", 1, 2),
        WeightFormat("Q4_0_4_4", 32, 18),
        WeightFormat("Q4_0_4_8", 32, 18),
        WeightFormat("Q4_0_8_8", 32, 18),
        WeightFormat("TQ1_0", 256, 54),
        WeightFormat("TQ2_0", 256, 66),
        WeightFormat("IQ4_NL_4_4", 32, 18),
        WeightFormat("IQ4_NL_4_8", 32, 18),
        WeightFormat("IQ4_NL_8_8", 32, 18),
        WeightFormat("MXFP4", 32, 17),
        WeightFormat("NVFP4", 64, 36),
        WeightFormat("Q1_0", 128, 18),
    )
}
"""Every format that is known by name, also those that `decode` does not read: a reader checks extents with it."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Block-quantised rows: w[n, k] = scale[n, k // group] * (q[n, k] - zero) + offset[n, k // group]."""

    q: I8 | U8  # (N, K)
    scale: F32  # (N, K / group)
    offset: F32 | None  # (N, K / group); None: no offset, not even +0.0
    zero: int = 0

    @property
    def group(self) -> int:
        """Consecutive weights that share a scale: 32, or 16 in Q6_K."""
        return int(self.q.shape[1] // self.scale.shape[1])

    def with_half_scales(self) -> Quantised:
        """The same with scales and offsets rounded to 16-bit floats, as backends hold them: by 2^-11 of each at most.

        Only K formats change. Their scale is a 16-bit float times a small integer; in the others it has 16 bits.
        """
        return replace(self, scale=_rounded(self.scale), offset=None if self.offset is None else _rounded(self.offset))

    def dequantise(self) -> F32:
        """The weights as float32, (N, K); each operation is rounded as written above."""
        rows, cols = self.q.shape
        levels = (self.q.astype(np.int16) - self.zero).astype(np.float32).reshape(rows, -1, self.group)
        with np.errstate(invalid="ignore", over="ignore"):  # a file may hold infinite scales: logits show them
            weights = self.scale[:, :, None] * levels
            if self.offset is not None:
                weights += self.offset[:, :, None]
        return weights.reshape(rows, cols)


def bytes_of(type_name: str, num_elements: int) -> int:
    """Bytes that `num_elements` weights take. ModelError for an unknown type or a count that is not whole blocks."""
    kind = FORMATS.get(type_name)
    if kind is None:
        raise ModelError(f"weight type {type_name!r} is not known")
    if num_elements % kind.block:
        raise ModelError(f"{num_elements} weights are not whole blocks of {kind.block}, as {type_name} needs")
    return num_elements // kind.block * kind.block_bytes


def supported_types() -> list[str]:
    """Names of the types that `decode` reads."""
    return [*_PLAIN, *_QUANTISED]


def decode(tensor: RawTensor) -> Quantised | F32:
    """The tensor's numbers: float types as float32 in the tensor's shape, block types as `Quantised`.

    N is the product of all extents but the last, K the last. ModelError names the tensor when its type is not
    supported, its rows are not whole blocks or its bytes do not match its shape.
    """
    _check(tensor)
    plain = _PLAIN.get(tensor.type_name)
    if plain is not None:
        return plain(tensor.data).reshape(tensor.shape)
    cols = tensor.shape[-1]
    rows = tensor.num_elements // cols
    with np.errstate(invalid="ignore", over="ignore"):
        return _QUANTISED[tensor.type_name](tensor.data.reshape(rows, cols // FORMATS[tensor.type_name].block, -1))


def dequantise(tensor: RawTensor) -> F32:
    """The tensor as float32 in its own shape. Errors as for `decode`."""
    numbers = decode(tensor)
    return numbers.dequantise().reshape(tensor.shape) if isinstance(numbers, Quantised) else numbers


def quantise_rows(x: F32, bits: Literal[8, 16]) -> tuple[I16, F32]:
    """Rounds activations (T, K) to levels (T, K) with a float32 scale per 32 lanes (T, K / 32): x ~ scale * level.

    16 bits: amax = max|x|; scale = amax / LARGEST; level = rint(x * (LARGEST / amax)), half to even. 8 bits: the range
    of a block's lanes and 0 is cut into STEPS steps, scale = (top - bottom) / STEPS, and a level is a byte within 127
    plus the block's offset rint((top + bottom) / 2 * (STEPS / (top - bottom))). A symmetric range would waste half of
    its levels where one lane stands out.

    A block whose inverse scale is not a finite positive number (all zero, below about 1e-36 or 1e-34, holding an
    infinity or NaN, or wider than float32 counts) has levels 0; its scale stays, so that what is not finite shows as a
    NaN in every output.
    """
    rows, cols = x.shape
    if cols % BLOCK:
        raise ModelError(f"activations of width {cols} are not whole blocks of {BLOCK}")
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(rows, cols // BLOCK, BLOCK)
    zero = np.float32(0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        top, bottom = np.maximum(blocks.max(axis=2), zero), np.minimum(blocks.min(axis=2), zero)
        width = top - bottom if bits == 8 else np.maximum(top, -bottom)
        steps = np.float32(STEPS if bits == 8 else LARGEST)
        scale, inverse = width / steps, steps / width
        usable = (np.isfinite(inverse) & (inverse > 0))[:, :, None]
        levels = np.rint(blocks * np.where(usable, inverse[:, :, None], zero))
        if bits == 8:
            offset = np.rint((top + bottom) * np.float32(0.5) * inverse)[:, :, None]
            levels = (levels - offset).clip(-127, 127) + offset
    return np.where(usable, levels, zero).astype(np.int16).reshape(rows, cols), scale


def _check(tensor: RawTensor) -> None:
    name, kind = tensor.name, tensor.type_name
    if kind not in _PLAIN and kind not in _QUANTISED:
        raise ModelError(
            f"tensor {name!r} has weight type {kind}, which is not supported",
            hint=f"supported: {', '.join(supported_types())}",
        )
    if not tensor.shape or not tensor.num_elements:
        raise ModelError(f"tensor {name!r} is empty: shape {tensor.shape}")
    block = FORMATS[kind].block
    if tensor.shape[-1] % block:
        raise ModelError(
            f"tensor {name!r}: rows of {tensor.shape[-1]} are not whole blocks of {block}, as {kind} needs"
        )
    if tensor.parts:
        raise ModelError(f"tensor {name!r} has {quoted_list(sorted(tensor.parts))} beside its data, as no {kind} has")
    needed = bytes_of(kind, tensor.num_elements)
    if tensor.data.size != needed:
        raise ModelError(f"tensor {name!r} has {tensor.data.size} bytes; {kind} of shape {tensor.shape} needs {needed}")


def _f32(data: U8) -> F32:
    return data.view("<f4").astype(np.float32, copy=False)


def _f16(data: U8) -> F32:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return data.view("<f2").astype(np.float32)


def _bf16(data: U8) -> F32:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _rounded(x: F32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _half(blocks: U8, start: int) -> F32:
    """The 16-bit float at byte `start` of each block, (N, blocks)."""
    return _f16(np.ascontiguousarray(blocks[:, :, start : start + 2]))[:, :, 0]


def _fields(packed: U8, run: int, bits: int) -> U8:
    """Splits bytes into fields of `bits` bits: (N, blocks, bytes) -> (N, K), K = weights in all blocks.

    Bytes come in runs: first the lowest fields of a run's bytes in order, then the next higher ones, to the highest.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    fields: U8 = (runs >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(len(packed), -1)


def _nibbles(packed: U8) -> U8:
    """(N, blocks, 16) bytes -> (N, K): lane j of a block is the low half of byte j, lane j + 16 its high half."""
    return _fields(packed, 16, 4)


def _fifth_bits(packed: U8) -> U8:
    """(N, blocks, 4) bytes -> (N, K), 16 where set: bit j of a block's 32 is lane j's."""
    bits: U8 = np.unpackbits(np.ascontiguousarray(packed), axis=2, bitorder="little")
    return bits.reshape(len(packed), -1) << np.uint8(4)


def _small_scales(packed: U8) -> tuple[F32, F32]:
    """(N, blocks, 12) bytes -> scales and minima of the eight sub-blocks, (N, blocks, 8) each, 0 to 63.

    Sub-blocks 0-3: the low 6 bits of bytes 0-3 (scales) and 4-7 (minima). Sub-blocks 4-7: low and high nibbles of bytes
    8-11, with the two top bits of bytes 0-3 and 4-7 above them.
    """
    low, high, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    six, four, top = np.uint8(63), np.uint8(15), np.uint8(0x30)
    scales = np.concatenate([low & six, (rest & four) | ((low >> np.uint8(2)) & top)], axis=2)
    minima = np.concatenate([high & six, (rest >> np.uint8(4)) | ((high >> np.uint8(2)) & top)], axis=2)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q8_0(blocks: U8) -> Quantised:
    q = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return Quantised(q.reshape(len(blocks), -1), _half(blocks, 0), None)


def _q4_0(blocks: U8) -> Quantised:
    return Quantised(_nibbles(blocks[:, :, 2:]), _half(blocks, 0), None, zero=8)


def _q4_1(blocks: U8) -> Quantised:
    return Quantised(_nibbles(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: U8) -> Quantised:
    return Quantised(_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6]), _half(blocks, 0), None, zero=16)


def _q5_1(blocks: U8) -> Quantised:
    q = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return Quantised(q, _half(blocks, 0), _half(blocks, 2))


def _k_scales(blocks: U8) -> tuple[F32, F32]:
    """Scale and offset of each sub-block of Q4_K and Q5_K, (N, K / 32): d * scale and -(dmin * minimum)."""
    scales, minima = _small_scales(blocks[:, :, 4:16])
    scale = _half(blocks, 0)[:, :, None] * scales
    offset = -(_half(blocks, 2)[:, :, None] * minima)
    return scale.reshape(len(blocks), -1), offset.reshape(len(blocks), -1)


def _q4_k(blocks: U8) -> Quantised:
    return Quantised(_fields(blocks[:, :, 16:], 32, 4), *_k_scales(blocks))


def _q5_k(blocks: U8) -> Quantised:
    q = _fields(blocks[:, :, 48:], 32, 4) | _fields(blocks[:, :, 16:48], 32, 1) << np.uint8(4)
    return Quantised(q, *_k_scales(blocks))


def _q6_k(blocks: U8) -> Quantised:
    q = _fields(blocks[:, :, :128], 64, 4) | _fields(blocks[:, :, 128:192], 32, 2) << np.uint8(4)
    small = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    scale = _half(blocks, 208)[:, :, None] * small
    return Quantised(q, scale.reshape(len(blocks), -1), None, zero=32)


_PLAIN: dict[str, Callable[[U8], F32]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
_QUANTISED: dict[str, Callable[[U8], Quantised]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
