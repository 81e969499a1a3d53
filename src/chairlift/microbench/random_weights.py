"""Random weights in the block formats of GGUF files, whose products stay near the size of their input.

Blocks are drawn as bytes, with scales that keep activations finite through any number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from chairlift.models import quant
from chairlift.models.spec import RawTensor

U8 = npt.NDArray[np.uint8]

CHUNK_BYTES = 16 << 20
"""Drawn at a time, so that a tensor need not fit into memory."""

_SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes from the start of a block to its 16-bit scale, and to its minimum."""


def draw(rng: np.random.Generator, weight_type: str, extent: tuple[int, ...]) -> Iterator[U8]:
    """The bytes of a tensor in chunks: ones for a norm (F32), else random blocks whose rows have length near 1."""
    if weight_type == "F32":
        yield np.ones(extent, "<f4").view(np.uint8)
        return
    kind = quant.FORMATS[weight_type]
    num_blocks = int(np.prod(extent)) // kind.block
    for start in range(0, num_blocks, CHUNK_BYTES // kind.block_bytes):
        count = min(CHUNK_BYTES // kind.block_bytes, num_blocks - start)
        yield draw_blocks(rng, weight_type, count, extent[-1] ** -0.5).reshape(-1)


def draw_blocks(rng: np.random.Generator, weight_type: str, count: int, std: float) -> U8:
    """Random levels, (count, bytes of a block), scaled so that the root mean square of the weights is `std`.

    Levels may have a mean, which would add up from layer to layer. A random sign for each block takes it away.
    """
    block_bytes = quant.FORMATS[weight_type].block_bytes
    blocks = np.frombuffer(rng.bytes(count * block_bytes), np.uint8).reshape(count, block_bytes).copy()
    signs = 1.0 - 2.0 * rng.integers(0, 2, (count, 1))
    _set_scales(blocks, weight_type, std / _size_at_scale_1(weight_type) * signs)
    return blocks


def _set_scales(blocks: U8, weight_type: str, scales: npt.NDArray[np.floating]) -> None:
    """Writes the scale of each block, and its minimum if it has one; `scales` is (count, 1)."""
    for at in _SCALE_OFFSETS[weight_type]:
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)


@cache
def _size_at_scale_1(weight_type: str) -> float:
    """Root mean square of random weights whose scales are 1."""
    block = quant.FORMATS[weight_type]
    blocks = np.random.default_rng(0).integers(0, 256, (4096, block.block_bytes), np.uint8)
    _set_scales(blocks, weight_type, np.ones((len(blocks), 1)))
    weights = quant.dequantise(RawTensor("", (len(blocks), block.block), weight_type, blocks.reshape(-1)))
    return float(np.sqrt(np.mean(np.square(weights, dtype=np.float64))))
