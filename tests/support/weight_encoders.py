"""Plain quantisers for every weight type that Chairlift reads: what the tests' model files are written with.

Independent of `chairlift.models.quant`. Not the best levels that a format has, but near enough to the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def _blocks(x: F32, size: int = 32) -> F32:
    return np.ascontiguousarray(x, dtype=np.float32).reshape(-1, size)


def _f16(x: F32) -> U8:
    return np.ascontiguousarray(x.astype("<f2")).view(np.uint8).reshape(len(x), 2)


def _inverse(d: F32) -> F32:
    return np.where(d == 0, np.float32(0), 1 / np.where(d == 0, np.float32(1), d)).astype(np.float32)


def _nibbles(q: U8) -> U8:
    """(B, 32) levels -> (B, 16) bytes of their low 4 bits: lane j below lane j + 16 in byte j."""
    return (q[:, :16] & 15) + (q[:, 16:] & 15) * np.uint8(16)


def _fifth_bits(q: U8) -> U8:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _q8_0(x: F32) -> bytes:
    b = _blocks(x)
    d = (np.abs(b).max(axis=1, keepdims=True) / 127).astype(np.float32)
    q = np.rint(b * _inverse(d)).astype(np.int8)
    return np.hstack([_f16(d), q.view(np.uint8)]).tobytes()


def _symmetric(x: F32, zero: int) -> tuple[F32, U8]:
    """Scale and levels in [0, 2 zero): the extreme weight of each block is level 0."""
    b = _blocks(x)
    extreme = np.take_along_axis(b, np.abs(b).argmax(axis=1, keepdims=True), axis=1)
    d = extreme / np.float32(-zero)
    return d, np.clip(np.floor(b * _inverse(d) + zero + 0.5), 0, 2 * zero - 1).astype(np.uint8)


def _from_least(x: F32, most: int) -> tuple[F32, F32, U8]:
    """Scale, minimum and levels in [0, most]."""
    b = _blocks(x)
    low = b.min(axis=1, keepdims=True)
    d = ((b.max(axis=1, keepdims=True) - low) / most).astype(np.float32)
    return d, low, np.clip(np.floor((b - low) * _inverse(d) + 0.5), 0, most).astype(np.uint8)


def _q4_0(x: F32) -> bytes:
    d, q = _symmetric(x, 8)
    return np.hstack([_f16(d), _nibbles(q)]).tobytes()


def _q4_1(x: F32) -> bytes:
    d, low, q = _from_least(x, 15)
    return np.hstack([_f16(d), _f16(low), _nibbles(q)]).tobytes()


def _q5_0(x: F32) -> bytes:
    d, q = _symmetric(x, 16)
    return np.hstack([_f16(d), _fifth_bits(q), _nibbles(q)]).tobytes()


def _q5_1(x: F32) -> bytes:
    d, low, q = _from_least(x, 31)
    return np.hstack([_f16(d), _f16(low), _fifth_bits(q), _nibbles(q)]).tobytes()


def _sub_blocks(x: F32, most: int) -> tuple[U8, U8]:
    """Header (B, 16: d, dmin, twelve bytes of 6-bit scales and minima) and levels (B, 8, 32) of Q4_K and Q5_K."""
    b = _blocks(x, 256).reshape(-1, 8, 32)
    below = np.maximum(0, -b.min(axis=2))
    width = (b.max(axis=2) + below) / most
    d, dmin = (v.max(axis=1, keepdims=True) / 63 for v in (width, below))
    scales, minima = (np.ceil(v * _inverse(u)).clip(0, 63).astype(np.uint8) for v, u in ((width, d), (below, dmin)))
    scale, minimum = (d * scales)[:, :, None], (dmin * minima)[:, :, None]
    q = np.clip(np.rint((b + minimum) * _inverse(scale)), 0, most).astype(np.uint8)
    top = [(v[:, 4:] >> 4) * np.uint8(64) for v in (scales, minima)]
    nibbles = (scales[:, 4:] & 15) + (minima[:, 4:] & 15) * np.uint8(16)
    return np.hstack([_f16(d), _f16(dmin), scales[:, :4] + top[0], minima[:, :4] + top[1], nibbles]), q


def _paired(q: U8) -> U8:
    """(B, 8, 32) levels -> (B, 128): sub-blocks 2p and 2p + 1 in the low and high halves of the same 32 bytes."""
    return ((q[:, ::2] & 15) + (q[:, 1::2] & 15) * np.uint8(16)).reshape(len(q), 128)


def _q4_k(x: F32) -> bytes:
    header, q = _sub_blocks(x, 15)
    return np.hstack([header, _paired(q)]).tobytes()


def _q5_k(x: F32) -> bytes:
    header, q = _sub_blocks(x, 31)
    high = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0]  # bit s of byte l: sub-block s, lane l
    return np.hstack([header, high, _paired(q)]).tobytes()


def _q6_k(x: F32) -> bytes:
    b = _blocks(x, 256).reshape(-1, 16, 16)
    largest = np.abs(b).max(axis=2) / 31
    d = largest.max(axis=1, keepdims=True) / 127
    small = np.ceil(largest * _inverse(d)).clip(0, 127).astype(np.int8)
    q = np.clip(np.rint(b * _inverse(d * small)[:, :, None]) + 32, 0, 63).astype(np.uint8)
    quarters = q.reshape(-1, 2, 4, 32)  # two halves of 128 lanes, each as four quarters
    low = (quarters[:, :, :2] & 15) + (quarters[:, :, 2:] & 15) * np.uint8(16)
    high = sum((quarters[:, :, i] >> 4) * np.uint8(4**i) for i in range(4))
    parts = [low.reshape(-1, 128), np.asarray(high).reshape(-1, 64), small.view(np.uint8), _f16(d)]
    return np.hstack(parts).tobytes()


def _bf16(x: F32) -> bytes:
    bits: npt.NDArray[np.uint32] = np.ascontiguousarray(x, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # round half to even


ENCODERS: dict[str, Callable[[F32], bytes]] = {
    "F32": lambda x: np.ascontiguousarray(x, dtype="<f4").tobytes(),
    "F16": lambda x: np.ascontiguousarray(x, dtype="<f2").tobytes(),
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
