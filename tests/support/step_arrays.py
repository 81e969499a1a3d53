"""Steps by hand, for tests that drive a model without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.kernels.backend import BLOCK_SIZE
from chairlift.kernels.ops import SAMPLE_DTYPE, StepArrays


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows: `tokens` at positions from `start` on; logits for its last `num_logits` rows."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    num_logits: int = 1


def make_step(parts: Sequence[Part], **sample: float) -> StepArrays:
    """A step that gives raw logits too; every logit row samples greedily unless `sample` has other fields."""
    positions = [np.arange(p.start, p.start + len(p.tokens)) for p in parts]
    tables = [np.array(p.table) for p in parts]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p, t in zip(positions, tables, strict=True)]
    ends = np.cumsum([len(p.tokens) for p in parts])
    wanted = [np.arange(end - p.num_logits, end) for p, end in zip(parts, ends, strict=True)]
    count = sum(p.num_logits for p in parts)
    records = np.zeros(count, SAMPLE_DTYPE)
    for name, value in {"top_p": 1.0, "repetition_penalty": 1.0, "target": -1, "num_top": -1, **sample}.items():
        records[name] = value
    empty, starts = np.zeros(0, np.int32), np.zeros(count + 1, np.int32)
    return StepArrays(
        tokens=np.concatenate([np.array(p.tokens) for p in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        seq_starts=np.array([0, *ends], np.int32),
        table_starts=np.array([0, *np.cumsum([len(t) for t in tables])], np.int32),
        block_tables=np.concatenate(tables).astype(np.int32),
        logit_rows=np.concatenate(wanted).astype(np.int32),
        sample=records,
        bias_starts=starts,
        bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
        seen_starts=starts,
        seen_ids=empty,
        seen_counts=empty,
        want_logits=True,
    )
