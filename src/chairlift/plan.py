"""The resolved decision the engine boots from: what was asked, cut to what model and machine carry, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chairlift.models.spec import ModelSpec

Batching = Literal["continuous", "static", "serial"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything sized. What this says is what is allocated."""

    spec: ModelSpec
    model_name: str  # as served
    model_format: str  # e.g. "Q4_1 + Q8_0"
    weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    block_size: int
    num_blocks: int
    kv_dtype: Literal["f16", "int8"]
    kv_bytes_per_token: int
    prefix_caching: bool
    batching: Batching
    max_gap_s: float | None  # None: the larger of 0.1 s and twice the decode-only step
    watchdog_s: float
    threads: int
    isa: str
    seed: int
    notes: tuple[str, ...] = ()  # each thing that was lowered or chosen, and why

    @property
    def pool_tokens(self) -> int:
        """Tokens the KV pool holds: reserved, not used."""
        return self.num_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.pool_tokens * self.kv_bytes_per_token

    @property
    def full_conversations(self) -> float:
        """How many conversations of `max_model_len` the pool holds."""
        return self.pool_tokens / self.max_model_len
