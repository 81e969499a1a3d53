"""Checks a step for backends in Python; the core has checks of its own. A wrong index must be an error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chairlift.errors import EngineError
from chairlift.kernels.backend import KVLayout
from chairlift.kernels.ops import I32, MAX_TOP, SAMPLE_DTYPE, StepArrays


def check_step(step: StepArrays, *, vocab_size: int, kv: KVLayout, max_rows: int) -> None:
    """Checks shapes, dtypes and ranges, and that slots are where the block tables say. EngineError names the field."""
    rows, wanted = len(step.tokens), len(step.logit_rows)
    _need(1 <= rows <= max_rows, f"{rows} rows; this model takes 1 to {max_rows}")
    _within("tokens", step.tokens, rows, vocab_size)
    _within("positions", step.positions, rows, kv.num_blocks * kv.block_size)
    _within("slots", step.slots, rows, kv.num_blocks * kv.block_size)
    _within("block_tables", step.block_tables, len(step.block_tables), kv.num_blocks)
    _ragged("seq_starts", step.seq_starts, len(step.seq_starts) - 1, rows, least=1)
    _ragged("table_starts", step.table_starts, len(step.seq_starts) - 1, len(step.block_tables), least=1)
    _check_slots(step, kv.block_size)

    _within("logit_rows", step.logit_rows, wanted, rows)
    _need(bool((np.diff(step.logit_rows) > 0).all()), "logit_rows are not ascending")
    _need(step.sample.dtype == SAMPLE_DTYPE and step.sample.shape == (wanted,), "sample has another dtype or shape")
    _need(bool((step.sample["target"] < vocab_size).all()), "a target lies beyond the vocabulary")
    _need(bool((step.sample["num_top"] <= MAX_TOP).all()), f"num_top is above {MAX_TOP}")
    _ragged("bias_starts", step.bias_starts, wanted, len(step.bias_ids), least=0)
    _within("bias_ids", step.bias_ids, len(step.bias_ids), vocab_size)
    _need(step.bias_values.shape == step.bias_ids.shape, "bias_values and bias_ids differ in length")
    _need(step.bias_values.dtype == np.float32, "bias_values are not float32")
    _ragged("seen_starts", step.seen_starts, wanted, len(step.seen_ids), least=0)
    _within("seen_ids", step.seen_ids, len(step.seen_ids), vocab_size)
    _within("seen_counts", step.seen_counts, len(step.seen_ids), np.iinfo(np.int32).max)


def _check_slots(step: StepArrays, block_size: int) -> None:
    """Rows of a sequence are consecutive positions, its table reaches them, and no two rows share a slot."""
    sequence = np.repeat(np.arange(len(step.seq_starts) - 1), np.diff(step.seq_starts))
    same = sequence[1:] == sequence[:-1]
    _need(bool((np.diff(step.positions)[same] == 1).all()), "positions of a sequence are not consecutive")
    entry = step.table_starts[sequence] + step.positions // block_size
    _need(bool((entry < step.table_starts[sequence + 1]).all()), "a block table ends before its sequence does")
    expected = step.block_tables[entry] * block_size + step.positions % block_size
    _need(bool((step.slots == expected).all()), "slots differ from what block_tables and positions say")
    _need(len(np.unique(step.slots)) == len(step.slots), "two rows share a slot")


def _within(name: str, values: I32, size: int, limit: int) -> None:
    """(size,) int32, each in [0, limit)."""
    _need(values.shape == (size,) and values.dtype == np.int32, f"{name} is not int32 of shape ({size},)")
    _need(bool(((values >= 0) & (values < limit)).all()), f"{name} has values outside [0, {limit})")


def _ragged(name: str, starts: I32, count: int, total: int, *, least: int) -> None:
    """(count + 1,) int32 from 0 to total, each entry holding at least `least` values."""
    _need(starts.shape == (count + 1,) and starts.dtype == np.int32, f"{name} is not int32 of shape ({count + 1},)")
    _need(count >= 0 and starts[0] == 0 and starts[-1] == total, f"{name} does not run from 0 to {total}")
    _need(bool((np.diff(starts) >= least).all()), f"{name} has entries of fewer than {least} values")


def _need(holds: bool | npt.NDArray[np.bool_], what: str) -> None:
    if not holds:
        raise EngineError(f"malformed step: {what}")
