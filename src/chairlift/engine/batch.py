"""Step -> flat arrays: tokens, positions, slots, block tables, and the rows that need logits.

The last pure-Python look at requests; below this line there are only arrays. Every array is int32 unless said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.step import Piece, Step
from chairlift.kernels.ops import F32, I32, SAMPLE_DTYPE, StepArrays

SAMPLES = -1
"""`Row.target` of a row that chooses the next token; otherwise the prompt token whose log-probability is wanted."""


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row that needs logits: whose it is, where, and what for."""

    piece: int  # index into Step.pieces
    row: int  # row of the step
    target: int  # SAMPLES, or a prompt token


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as arrays, and the owners of its logit rows in the same order."""

    arrays: StepArrays
    logit_rows: tuple[LogitRow, ...]


def build(step: Step, block_size: int, *, want_logits: bool = False) -> Batch:
    """Flattens a step. Rows of one request are consecutive; requests keep the step's order."""
    pieces = step.pieces
    seq_starts = _starts(piece.num_tokens for piece in pieces)
    tables = [piece.request.block_table[: -(-piece.stop // block_size)] for piece in pieces]
    positions = _concat([np.arange(piece.start, piece.stop, dtype=np.int32) for piece in pieces])
    rows = tuple(row for i, piece in enumerate(pieces) for row in _logit_rows(i, piece, int(seq_starts[i])))
    owners = [pieces[row.piece].request for row in rows]
    bias = [_bias(request) if row.target == SAMPLES else {} for row, request in zip(rows, owners, strict=True)]
    seen = [_seen(request) if row.target == SAMPLES else {} for row, request in zip(rows, owners, strict=True)]
    arrays = StepArrays(
        tokens=_ints(token for piece in pieces for token in piece.request.tokens_between(piece.start, piece.stop)),
        positions=positions,
        slots=_slots(tables, pieces, block_size),
        seq_starts=seq_starts,
        table_starts=_starts(map(len, tables)),
        block_tables=_ints(block for table in tables for block in table),
        logit_rows=_ints(row.row for row in rows),
        sample=_records(rows, owners),
        bias_starts=_starts(map(len, bias)),
        bias_ids=_ints(token for entry in bias for token in entry),
        bias_values=_floats(value for entry in bias for value in entry.values()),
        seen_starts=_starts(map(len, seen)),
        seen_ids=_ints(token for entry in seen for token in entry),
        seen_counts=_ints(count for entry in seen for count in entry.values()),
        want_logits=want_logits,
    )
    return Batch(arrays, rows)


def _logit_rows(index: int, piece: Piece, first_row: int) -> Iterable[LogitRow]:
    request = piece.request
    if request.params.prompt_logprobs is not None:
        # The row at position p tells the log-probability of token p + 1; after a preemption only what is missing.
        known = max(1, len(request.prompt_logprobs))
        for target in range(max(piece.start + 1, known), min(piece.stop + 1, request.num_prompt)):
            yield LogitRow(index, first_row + target - 1 - piece.start, request.prompt[target])
    if piece.samples:
        yield LogitRow(index, first_row + piece.num_tokens - 1, SAMPLES)


def _slots(tables: Sequence[Sequence[int]], pieces: Sequence[Piece], block_size: int) -> I32:
    slots = []
    for table, piece in zip(tables, pieces, strict=True):
        positions = np.arange(piece.start, piece.stop, dtype=np.int32)
        first = piece.start // block_size
        blocks = np.asarray(table[first:], dtype=np.int32)
        slots.append(blocks[positions // block_size - first] * block_size + positions % block_size)
    return _concat(slots)


def _bias(request: Request) -> Mapping[int, float]:
    params = request.params
    if len(request.output) >= params.min_tokens:
        return params.logit_bias
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else request.eos_ids)
    return {**params.logit_bias, **dict.fromkeys(ends, -np.inf)}


def _seen(request: Request) -> Mapping[int, int]:
    return request.seen() if request.params.has_penalties else {}


def _records(rows: Sequence[LogitRow], owners: Sequence[Request]) -> npt.NDArray[Any]:
    records = [
        _sampling_record(request.params, len(request.output)) if row.target == SAMPLES else _target_record(row, request)
        for row, request in zip(rows, owners, strict=True)
    ]
    return np.array(records, dtype=SAMPLE_DTYPE)


def _sampling_record(params: SamplingParams, index: int) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k,
        -1 if params.logprobs is None else params.logprobs,
        SAMPLES,
        params.choice,
        index,
        0,
        params.seed,
    )


def _target_record(row: LogitRow, request: Request) -> tuple[float, ...]:
    num_top = request.params.prompt_logprobs or 0
    return (0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, num_top, row.target, 0, 0, 0, 0)


def _starts(lengths: Iterable[int]) -> I32:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int32)


def _ints(values: Iterable[int]) -> I32:
    return np.fromiter(values, dtype=np.int32)


def _floats(values: Iterable[float]) -> F32:
    return np.fromiter(values, dtype=np.float32)


def _concat(parts: Sequence[I32]) -> I32:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.zeros(0, dtype=np.int32)
