"""A tiny model on the native core or the reference, for the tests of the core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chairlift.kernels.backend import BLOCK_SIZE, Backend, KVDtype, KVLayout, LoadSpec, Model
from chairlift.kernels.ops import F32
from chairlift.models import registry
from chairlift.models.checkpoint import open_checkpoint
from support.step_arrays import Part, make_step

NUM_BLOCKS = 12
MAX_ROWS = 64


def load(
    backend: Backend,
    path: Path,
    kv: KVDtype = "bf16",
    *,
    num_blocks: int = NUM_BLOCKS,
    rows: int = MAX_ROWS,
) -> Model:
    """Loads a GGUF file with a small pool."""
    with open_checkpoint(path) as file:
        spec = file.spec
        layout = KVLayout(num_blocks, BLOCK_SIZE, kv)
        tensors = registry.model_tensors(spec, file.tensors)
        forward = registry.forward_for(spec.architecture)
        return backend.load(LoadSpec(spec, forward, tensors, layout, rows))


def tokens_of(seed: int, count: int) -> list[int]:
    """Reproducible token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]


def logits_of(model: Model, parts: Sequence[Part]) -> F32:
    """Raw logits of the wanted rows, (L, vocab)."""
    logits = model.run(make_step(parts)).logits
    assert logits is not None
    return logits


def whole(model: Model, tokens: Sequence[int], table: Sequence[int]) -> F32:
    """Logits of every row of one sequence, computed alone in one step."""
    return logits_of(model, [Part(tokens, 0, table, len(tokens))])


def in_chunks(model: Model, tokens: Sequence[int], table: Sequence[int], sizes: Sequence[int]) -> F32:
    """Logits of every row of one sequence, computed in steps of these sizes."""
    done, rows = 0, []
    for size in sizes:
        rows.append(logits_of(model, [Part(tokens[done : done + size], done, table, size)]))
        done += size
    assert done == len(tokens)
    return np.concatenate(rows)
