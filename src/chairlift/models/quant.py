"""Weight formats: how many bytes they take, and what numbers they stand for. The numpy specification of every one.

Block formats are GGML's (ggml-common.h): a row is cut into blocks of consecutive weights, each with its own scale.
Knows nothing of files beyond `RawTensor`, and nothing of the packed layouts that the compiled kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.errors import ModelError
from chairlift.models.spec import RawTensor

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]

BLOCK = 32
"""Weights per block in the formats decoded here, and activations per scale."""
LARGEST = 127 * 256
"""The level of a block's largest activation. It has the bytes 127 and 0: 8-bit products do the work of 16-bit ones."""


class GGMLType(NamedTuple):
    """A tensor type of the file format: `block_bytes` hold `block` consecutive weights."""

    name: str
    block: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    31: GGMLType("Q4_0_4_4", 32, 18),
    32: GGMLType("Q4_0_4_8", 32, 18),
    33: GGMLType("Q4_0_8_8", 32, 18),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    36: GGMLType("IQ4_NL_4_4", 32, 18),
    37: GGMLType("IQ4_NL_4_8", 32, 18),
    38: GGMLType("IQ4_NL_8_8", 32, 18),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
"""Every type that a GGUF file may hold, by its number: enough to check extents. 4 and 5 were gone before GGUF was."""

_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


@dataclass(frozen=True, slots=True)
class Quantised:
    """Block-quantised rows: w[n, k] = scale[n, k // 32] * (q[n, k] - zero) + offset[n, k // 32]."""

    q: I8 | U8  # (N, K)
    scale: F32  # (N, K / 32)
    offset: F32 | None  # (N, K / 32); None: no offset, not even +0.0
    zero: int = 0

    def dequantise(self) -> F32:
        """The weights as float32, (N, K); each operation is rounded as written above."""
        rows, cols = self.q.shape
        levels = (self.q.astype(np.int16) - self.zero).astype(np.float32).reshape(rows, cols // BLOCK, BLOCK)
        with np.errstate(invalid="ignore", over="ignore"):  # a file may hold infinite scales: logits show them
            weights = self.scale[:, :, None] * levels
            if self.offset is not None:
                weights += self.offset[:, :, None]
        return weights.reshape(rows, cols)


def bytes_of(type_name: str, num_elements: int) -> int:
    """Bytes that so many weights take. ModelError for an unknown type or a count that is not whole blocks."""
    kind = _BY_NAME.get(type_name)
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
    return _QUANTISED[tensor.type_name](tensor.data.reshape(rows, cols // BLOCK, -1))


def dequantise(tensor: RawTensor) -> F32:
    """The tensor as float32 in its own shape. Errors as for `decode`."""
    numbers = decode(tensor)
    return numbers.dequantise().reshape(tensor.shape) if isinstance(numbers, Quantised) else numbers


def quantise_rows(x: F32) -> tuple[I16, F32]:
    """Rounds activations (T, K) to int16 levels (T, K), one float32 scale per 32 lanes (T, K / 32): x ~ scale * q.

    amax = max|x|; scale = amax / LARGEST; q = rint(x * (LARGEST / amax)), half to even. A block whose LARGEST / amax is
    not a finite positive number (all zero, below about 1e-34, or holding an infinity or NaN) has q = 0; the scale stays
    amax / LARGEST, so what is not finite stays visible as a NaN in every output.
    """
    rows, cols = x.shape
    if cols % BLOCK:
        raise ModelError(f"activations of width {cols} are not whole blocks of {BLOCK}")
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(rows, cols // BLOCK, BLOCK)
    amax = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = amax / np.float32(LARGEST)
        inverse = np.float32(LARGEST) / amax
        usable = np.isfinite(inverse) & (inverse > 0)
        lanes = np.rint(blocks * np.where(usable, inverse, np.float32(0))[:, :, None])
    q = np.where(usable[:, :, None], lanes, np.float32(0)).astype(np.int16)
    return q.reshape(rows, cols), scale


def _check(tensor: RawTensor) -> None:
    name, kind = tensor.name, tensor.type_name
    if kind not in _PLAIN and kind not in _QUANTISED:
        raise ModelError(
            f"tensor {name!r} has weight type {kind}, which is not supported",
            hint=f"supported: {', '.join(supported_types())}",
        )
    if not tensor.shape or not tensor.num_elements:
        raise ModelError(f"tensor {name!r} is empty: shape {tensor.shape}")
    if tensor.shape[-1] % _BY_NAME[kind].block:
        raise ModelError(
            f"tensor {name!r}: rows of {tensor.shape[-1]} are not whole blocks of {BLOCK}, as {kind} needs"
        )
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


def _half(blocks: U8, start: int) -> F32:
    """The 16-bit float at byte `start` of each block, (N, blocks)."""
    return _f16(np.ascontiguousarray(blocks[:, :, start : start + 2]))[:, :, 0]


def _nibbles(packed: U8) -> U8:
    """(N, blocks, 16) bytes -> (N, K): lane j of a block is the low half of byte j, lane j + 16 its high half."""
    lanes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    return lanes.reshape(len(packed), -1)


def _q8_0(blocks: U8) -> Quantised:
    q = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return Quantised(q.reshape(len(blocks), -1), _half(blocks, 0), None)


def _q4_0(blocks: U8) -> Quantised:
    return Quantised(_nibbles(blocks[:, :, 2:]), _half(blocks, 0), None, zero=8)


def _q4_1(blocks: U8) -> Quantised:
    return Quantised(_nibbles(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2))


_PLAIN: dict[str, Callable[[U8], F32]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
_QUANTISED: dict[str, Callable[[U8], Quantised]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
