"""Decides the sizes that the engine starts with, and notes why one is smaller than what was asked.

Knows no backend: `BackendOffer` is all that it is told of one. The arithmetic is `cost.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from chairlift import cost
from chairlift.config import MAX_MEMORY_UTILIZATION, Config
from chairlift.engine.policies import Batching
from chairlift.errors import ConfigError, DoesNotFit
from chairlift.kernels.backend import BLOCK_SIZE, KVDtype, MemoryView
from chairlift.models.spec import ModelSpec

DEFAULT_SLOTS = 20
DEFAULT_CONTEXT = 8192
SLOT_TOKENS = 1024
"""Tokens of KV a slot gets by default, unless the context is shorter. Conversations are seldom full at once, and
memory that is touched at start costs a second per GiB on a new virtual machine (docs/log.md)."""
LEAST_CONTEXT = 256
"""A shorter context is refused unless it was asked for: it would not be worth starting."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every size that was decided, for any backend. What this says is what is allocated."""

    spec: ModelSpec
    model_name: str  # as served
    model_format: str  # e.g. "Q4_1 + Q8_0"
    weight_bytes: int  # in the container, before packing
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    block_size: int
    num_blocks: int
    kv_dtype: KVDtype
    kv_bytes_per_token: int
    prefix_caching: bool
    batching: Batching
    max_gap_s: float | None  # None: the larger of 0.1 s and twice the decode-only step
    watchdog_s: float
    max_queue_wait_s: float | None = None  # None: as long as it takes
    max_running_per_key: int | None = None
    notes: tuple[str, ...] = ()  # each thing that was lowered or chosen, and why

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool has room for, used or not."""
        return self.num_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.pool_tokens * self.kv_bytes_per_token

    @property
    def full_conversations(self) -> float:
        """Conversations of `max_model_len` that fit into the pool at once."""
        return cost.concurrency(self.pool_tokens, self.max_model_len)


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """What the plan needs to know of the model's weights."""

    name: str  # as served
    format: str  # e.g. "Q4_1 + Q8_0"
    weight_bytes: int  # in the container
    packed_bytes: int  # upper bound once the backend has loaded them


@dataclass(frozen=True, slots=True)
class BackendOffer:
    """What the plan needs to know of the backend: its memory, the step that suits it, and what it had to lower."""

    memory: MemoryView
    step_tokens: int
    working_bytes: Callable[[ModelSpec, int], int]  # of steps with that many rows
    notes: tuple[str, ...] = ()


def resolve(config: Config, spec: ModelSpec, model: ModelOnDisk, offer: BackendOffer) -> Plan:
    """Cuts what was asked to what model and backend carry.

    Raises ConfigError for what the model cannot do, DoesNotFit (before anything is loaded) for what memory cannot hold.
    """
    notes = [*offer.notes, *filter(None, [spec.context_note])]
    kv_dtype: KVDtype = "int8" if config.kv_cache_dtype == "int8" else "bf16"
    step_tokens = config.max_num_batched_tokens or max(offer.step_tokens, config.max_num_seqs or 0)
    memory = _Memory.after_weights(config, model, offer.memory, offer.working_bytes(spec, step_tokens))
    per_token = cost.kv_bytes_per_token(spec, kv_dtype)
    limit = memory.pool_limit(per_token * BLOCK_SIZE)
    limit_blocks = cost.blocks_in(limit, per_token, BLOCK_SIZE)
    max_model_len = _context(_asked_context(config, spec, notes), limit_blocks, per_token, memory, notes)
    slots = _slots(config, memory.carries(max_model_len, per_token), step_tokens, notes)
    num_blocks = limit_blocks if config.kv_memory else min(limit_blocks, _useful_blocks(slots, max_model_len))
    if num_blocks * BLOCK_SIZE < slots * max_model_len:
        full = cost.concurrency(num_blocks * BLOCK_SIZE, max_model_len)
        notes.append(
            f"{slots} slots exceed the {full:.1f} full conversations that the KV pool holds: when it is full, the "
            f"youngest waits and resumes; --kv-memory {_mib(slots * max_model_len * per_token)}MiB would hold all"
        )
    return Plan(
        spec=spec,
        model_name=model.name,
        model_format=model.format,
        weight_bytes=model.weight_bytes,
        max_model_len=max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=step_tokens,
        max_queue=2 * slots if config.max_queue is None else config.max_queue,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=per_token,
        prefix_caching=config.prefix_caching,
        batching=config.batching,
        max_gap_s=None if config.max_gap_ms is None else config.max_gap_ms / 1000,
        watchdog_s=config.watchdog_s,
        max_queue_wait_s=config.max_queue_wait,
        max_running_per_key=config.max_running_per_key,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory that is left for the KV pool, and the error that says it is too little."""

    model: ModelOnDisk
    view: MemoryView
    utilization: float
    asked: int | None  # --kv-memory
    working_bytes: int  # activations and the rest of the process

    @classmethod
    def after_weights(cls, config: Config, model: ModelOnDisk, view: MemoryView, working: int) -> _Memory:
        """DoesNotFit when the weights alone are too large."""
        memory = cls(model, view, config.memory_utilization, config.kv_memory, working)
        if memory.room <= 0:
            raise memory.too_small(0, "no KV yet")
        return memory

    @property
    def room(self) -> int:
        """Bytes left after weights and working memory."""
        return self.view.available_bytes - self.model.packed_bytes - self.working_bytes

    @property
    def share(self) -> int:
        """Bytes of the room that a pool takes unless --kv-memory says otherwise."""
        return int(self.room * self.utilization)

    def pool_limit(self, block_bytes: int) -> int:
        """Most bytes of the pool: --kv-memory where it was given, else the share. Raises where that does not fit."""
        if self.asked is None:
            return self.share
        if self.asked < block_bytes:
            raise ConfigError(
                f"--kv-memory {self.asked}: one block of {BLOCK_SIZE} tokens takes {block_bytes} bytes",
                hint=f"use at least {block_bytes}",
            )
        if self.asked > self.room:
            raise self.too_small(self.asked, "--kv-memory")
        return self.asked

    def carries(self, context: int, per_token: int) -> int:
        """Conversations of `context` tokens that the share could hold; at least 1."""
        return max(1, self.share // (context * per_token))

    def too_small(self, kv_bytes: int, what: str) -> DoesNotFit:
        """The error, with bytes needed and available, what would fit, and the flag that changes it."""
        weights = self.model.packed_bytes
        needed = weights + self.working_bytes + kv_bytes
        human = cost.human_bytes
        if self.room <= 0:
            fits = (self.view.available_bytes - self.working_bytes) * self.model.weight_bytes // max(1, weights)
            hint = f"use a model or format with at most {human(max(0, fits))} of weights, or {self.view.remedy}"
        elif what == "--kv-memory":
            hint = f"at most --kv-memory {_mib(self.room, up=False)}MiB fits"
        else:
            hint = f"{human(self.share)} are left for KV at --memory-utilization {self.utilization:g}; "
            enough = math.ceil(100 * (kv_bytes + 1) / self.room) / 100
            raised = f"{enough:g} is enough, or " if enough <= MAX_MEMORY_UTILIZATION else ""
            hint += f"{raised}use --kv-cache-dtype int8 or a smaller model"
        return DoesNotFit(
            f"{self.model.name} does not fit: {human(needed)} needed (weights {human(weights)}, working memory "
            f"{human(self.working_bytes)}, {what} {human(kv_bytes)}), {human(self.view.available_bytes)} "
            f"available, limited by {self.view.limited_by}",
            hint=hint,
        )


def _asked_context(config: Config, spec: ModelSpec, notes: list[str]) -> int:
    if config.max_model_len is None:
        if spec.context_length > DEFAULT_CONTEXT:
            notes.append(f"context is {DEFAULT_CONTEXT} of the model's {spec.context_length} tokens: --max-model-len")
        return min(spec.context_length, DEFAULT_CONTEXT)
    if config.max_model_len > spec.context_length:
        why = spec.context_note or f"{spec.name} was trained for {spec.context_length} tokens"
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: {why}",
            hint=f"use at most {spec.context_length}",
        )
    return config.max_model_len


def _context(asked: int, limit_blocks: int, per_token: int, memory: _Memory, notes: list[str]) -> int:
    """The context length, lowered to what the largest pool holds; DoesNotFit below LEAST_CONTEXT."""
    tokens = limit_blocks * BLOCK_SIZE
    least = min(asked, LEAST_CONTEXT)
    if tokens < least and memory.asked is None:
        raise memory.too_small(least * per_token, f"KV for {least} tokens")
    if tokens >= asked:
        return asked
    flag = f"--memory-utilization {memory.utilization:g}" if memory.asked is None else "--kv-memory"
    notes.append(f"context lowered from {asked} to {tokens} tokens: the KV pool holds no more at this {flag}")
    return tokens


def _useful_blocks(slots: int, max_model_len: int) -> int:
    """The pool that a team needs, although memory may have more: one full context, or SLOT_TOKENS for each slot."""
    return cost.blocks_for(max(max_model_len, slots * min(max_model_len, SLOT_TOKENS)), BLOCK_SIZE)


def _slots(config: Config, carried: int, step_tokens: int, notes: list[str]) -> int:
    if config.batching == "serial":
        return 1
    slots = config.max_num_seqs
    if slots is None:
        slots = min(DEFAULT_SLOTS, carried)
        if slots < DEFAULT_SLOTS:
            notes.append(f"slots lowered from {DEFAULT_SLOTS} to {slots}, which memory carries at full context")
    if step_tokens < slots:
        notes.append(f"slots lowered from {slots} to {step_tokens}: a step carries no more tokens")
        slots = step_tokens
    return slots


def _mib(num_bytes: int, *, up: bool = True) -> int:
    return -(-num_bytes // 1024**2) if up else num_bytes // 1024**2
