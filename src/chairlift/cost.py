"""The only arithmetic: bytes, ceilings and times that follow from a model's dimensions and a machine's speeds.

Pure functions of numbers. The start card, the engine's own sizing, plan, doctor, bench and simulate all call these, so
that what one of them prints is what another allocates. Bytes are bytes, times seconds, rates per second.
"""

from __future__ import annotations

import math
from typing import Literal

from chairlift.models.spec import ModelSpec

SCALE_BYTES = 4
"""An int8 KV entry carries one float32 scale per token and head, for the key and for the value."""

LOGIT_ROWS = 32
"""Rows of logits that exist at once: the head runs in tiles of this many, whatever the batch."""


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: Literal["bf16", "int8"]) -> int:
    """Bytes of one token's keys and values: sum over layers of kv_heads x (key + value lanes) x bytes, and the scales.

    36 layers, 8 heads of 128, bf16: 36 * 8 * 256 * 2 = 147,456.
    """
    per_lane, per_head = (2, 0) if kv_dtype == "bf16" else (1, 2 * SCALE_BYTES)
    return sum(layer.num_kv_heads * ((layer.head_dim + layer.value_dim) * per_lane + per_head) for layer in spec.layers)


def packed_weight_bytes(file_bytes: int) -> int:
    """Upper bound of the weights once packed: no layout takes more than 1.15 x what the file does."""
    return file_bytes * 115 // 100


def file_weight_bytes(packed_bytes: int) -> int:
    """Weights of a file that surely take no more than so many bytes once packed."""
    return packed_bytes * 100 // 115


def blocks_in(pool_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Whole KV blocks that fit into so many bytes."""
    return max(0, pool_bytes) // (bytes_per_token * block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that so many tokens take."""
    return -(-num_tokens // block_size)


def concurrency(pool_tokens: int, context_tokens: int) -> float:
    """How many conversations of that length a pool holds at once."""
    return pool_tokens / context_tokens


def in_flight(users: float, generating_s: float, turn_s: float) -> float:
    """Requests running on average (Little's law): users x seconds of answer per turn / seconds from turn to turn.

    20 people who wait 12 s for an answer every 90 s: 20 * 12 / 90 = 2.7.
    """
    return users * generating_s / turn_s


def activation_bytes(spec: ModelSpec, max_rows: int) -> int:
    """Upper bound of a step's working memory: float32 rows of every intermediate, and the logit tile."""
    attention = max(
        (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim + layer.num_heads * layer.value_dim
        for layer in spec.layers
    )
    per_row = 4 * spec.hidden_size + 2 * attention + 3 * spec.ffn_size
    return 4 * (max_rows * per_row + LOGIT_ROWS * spec.vocab_size)


def decode_bytes(weight_bytes: int, kv_tokens: int, bytes_per_token: int) -> int:
    """Bytes that one decode step reads: every weight once, and the KV of every context token."""
    return weight_bytes + kv_tokens * bytes_per_token


def one_stream_ceiling(bandwidth: float, weight_bytes: int, *, kv_tokens: int = 0, bytes_per_token: int = 0) -> float:
    """Tokens/s that one stream cannot exceed on this memory (bytes/s): each token reads all weights and its context."""
    return bandwidth / decode_bytes(weight_bytes, kv_tokens, bytes_per_token)


def step_seconds(read_bytes: float, operations: float, *, bandwidth: float, compute: float) -> float:
    """Roofline: the slower of reading (bytes/s) and computing (operations/s)."""
    return max(read_bytes / bandwidth, operations / compute)


def human_bytes(num_bytes: float) -> str:
    """Bytes for people, three significant digits: 98,362,432 is "93.8 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(4, int(math.log(num_bytes, 1024)))
    value = num_bytes / 1024**power
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {'KMGT'[power - 1]}iB"
