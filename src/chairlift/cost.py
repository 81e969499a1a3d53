"""The only arithmetic: bytes and ceilings that follow from a model's dimensions and a machine's speeds.

Pure functions of numbers. The plan and the start card both call them, so that what one prints is what the other
allocates. Layers may differ: every sum goes over `ModelSpec.layers`. Sizes are in bytes, rates per second.
"""

from __future__ import annotations

import math
from typing import Literal

from chairlift.models.spec import LayerSpec, ModelSpec

SCALE_BYTES = 4
"""An int8 KV entry carries one float32 scale per token and head, for the key and for the value."""

LOGIT_ROWS = 32
"""Rows of logits that exist at once: the head runs in tiles of this many, whatever the batch."""


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: Literal["bf16", "int8"]) -> int:
    """Bytes of one token's keys and values over all layers.

    36 layers, 8 heads of 128, bf16: 36 * 8 * 256 * 2 = 147,456.
    """
    return sum(layer_kv_bytes(layer, kv_dtype) for layer in spec.layers)


def layer_kv_bytes(layer: LayerSpec, kv_dtype: Literal["bf16", "int8"]) -> int:
    """Bytes of one token's keys and values in one layer: kv_heads x (key + value lanes) x bytes, and the scales."""
    per_lane, per_head = (2, 0) if kv_dtype == "bf16" else (1, 2 * SCALE_BYTES)
    return layer.num_kv_heads * ((layer.head_dim + layer.value_dim) * per_lane + per_head)


def packed_weight_bytes(file_bytes: int) -> int:
    """Upper bound of the packed weights: no layout takes more than 1.15 x the bytes in the file."""
    return file_bytes * 115 // 100


def blocks_in(pool_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Whole KV blocks that fit into `pool_bytes`; 0 where that is negative."""
    return max(0, pool_bytes) // (bytes_per_token * block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that `num_tokens` take, the last one perhaps not full."""
    return -(-num_tokens // block_size)


def concurrency(pool_tokens: int, context_tokens: int) -> float:
    """How many conversations of `context_tokens` a pool holds at once."""
    return pool_tokens / context_tokens


def activation_bytes(spec: ModelSpec, max_rows: int) -> int:
    """Upper bound of a step's working memory: float32 rows of every intermediate of the largest layer, and the logit
    tile."""
    attention = max(
        (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim + layer.num_heads * layer.value_dim
        for layer in spec.layers
    )
    per_row = 4 * spec.hidden_size + 2 * attention + 3 * spec.ffn_size
    return 4 * (max_rows * per_row + LOGIT_ROWS * spec.vocab_size)


def one_stream_ceiling(bandwidth: float, weight_bytes: int) -> float:
    """Tokens/s that one stream cannot exceed on this memory (bytes/s): each token reads all weights."""
    return bandwidth / weight_bytes


def human_bytes(num_bytes: float) -> str:
    """Bytes for people, three significant digits: 98,362,432 is "93.8 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(4, int(math.log(num_bytes, 1024)))
    value = num_bytes / 1024**power
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {'KMGT'[power - 1]}iB"
