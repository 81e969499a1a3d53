"""Step -> flat arrays: tokens, positions, slots, block tables, and the rows that need logits.

The last pure-Python look at requests; below this line there are only arrays. Every array is int32 unless said.

They grow as `array.array` and become numpy's by view: with the dozens of small numpy calls that this would take, the
engine not only spends more time; each of them may let go of the interpreter, and the event loop takes it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from chairlift.engine.request import Request
from chairlift.engine.step import Piece, Step
from chairlift.kernels.ops import SAMPLE_DTYPE, StepArrays

SAMPLES = -1
"""`Row.target` of a row that chooses the next token; otherwise the prompt token whose log-probability is wanted."""

_RECORD = struct.Struct("@6f3i3IQ")  # SAMPLE_DTYPE


class LogitRow(NamedTuple):
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
    tokens, positions, slots, tables = _ints(), _ints(), _ints(), _ints()
    seq_starts, table_starts = _ints([0]), _ints([0])
    rows: list[LogitRow] = []
    for index, piece in enumerate(step.pieces):
        table = piece.request.block_table[: -(-piece.stop // block_size)]
        rows.extend(_logit_rows(index, piece, len(tokens)))
        if piece.num_tokens == 1:  # the common case, and several times as fast
            tokens.append(piece.request.token_at(piece.start))
            positions.append(piece.start)
            slots.append(table[-1] * block_size + piece.start % block_size)
        else:
            tokens.extend(piece.request.tokens_between(piece.start, piece.stop))
            positions.extend(range(piece.start, piece.stop))
            for run in _slots(table, piece, block_size):
                slots.extend(run)
        tables.extend(table)
        seq_starts.append(len(tokens))
        table_starts.append(len(tables))
    owners = [step.pieces[row.piece].request for row in rows]
    bias = [_bias(request) if row.target == SAMPLES else {} for row, request in zip(rows, owners, strict=True)]
    seen = [_seen(request) if row.target == SAMPLES else {} for row, request in zip(rows, owners, strict=True)]
    arrays = StepArrays(
        tokens=np.asarray(tokens),
        positions=np.asarray(positions),
        slots=np.asarray(slots),
        seq_starts=np.asarray(seq_starts),
        table_starts=np.asarray(table_starts),
        block_tables=np.asarray(tables),
        logit_rows=np.asarray(_ints([row.row for row in rows])),
        sample=np.frombuffer(_records(rows, owners), SAMPLE_DTYPE),
        bias_starts=np.asarray(_starts(bias)),
        bias_ids=np.asarray(_ints(token for entry in bias for token in entry)),
        bias_values=np.asarray(array("f", (value for entry in bias for value in entry.values()))),
        seen_starts=np.asarray(_starts(seen)),
        seen_ids=np.asarray(_joined(entry.keys() for entry in seen)),
        seen_counts=np.asarray(_joined(entry.values() for entry in seen)),
        want_logits=want_logits,
    )
    return Batch(arrays, tuple(rows))


def _logit_rows(index: int, piece: Piece, first_row: int) -> Iterable[LogitRow]:
    request = piece.request
    if request.params.prompt_logprobs is not None:
        # The row at position p tells the log-probability of token p + 1; after a preemption only what is missing.
        known = max(1, len(request.prompt_logprobs))
        for target in range(max(piece.start + 1, known), min(piece.stop + 1, request.num_prompt)):
            yield LogitRow(index, first_row + target - 1 - piece.start, request.prompt[target])
    if piece.samples:
        yield LogitRow(index, first_row + piece.num_tokens - 1, SAMPLES)


def _slots(table: Sequence[int], piece: Piece, block_size: int) -> Iterator[range]:
    """The pool slots of its positions: one run per block."""
    start = piece.start
    while start < piece.stop:
        index, offset = divmod(start, block_size)
        count = min(piece.stop - start, block_size - offset)
        slot = table[index] * block_size + offset
        yield range(slot, slot + count)
        start += count


def _bias(request: Request) -> Mapping[int, float]:
    params = request.params
    if len(request.output) >= params.min_tokens:
        return params.logit_bias
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else request.eos_ids)
    return {**params.logit_bias, **dict.fromkeys(ends, -np.inf)}


def _seen(request: Request) -> Mapping[int, int]:
    return request.seen() if request.params.has_penalties else {}


def _records(rows: Sequence[LogitRow], owners: Sequence[Request]) -> bytearray:
    records = bytearray(_RECORD.size * len(rows))
    for i, (row, request) in enumerate(zip(rows, owners, strict=True)):
        values = _sampling_record(request) if row.target == SAMPLES else _target_record(row, request)
        _RECORD.pack_into(records, i * _RECORD.size, *values)
    return records


def _sampling_record(request: Request) -> tuple[float, ...]:
    params = request.params
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
        len(request.output),
        0,
        params.seed,
    )


def _target_record(row: LogitRow, request: Request) -> tuple[float, ...]:
    num_top = request.params.prompt_logprobs or 0
    return (0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, num_top, row.target, 0, 0, 0, 0)


def _ints(values: Iterable[int] = ()) -> array[int]:
    return array("i", values)


def _joined(parts: Iterable[Iterable[int]]) -> array[int]:
    joined = _ints()
    for part in parts:
        joined.extend(part)
    return joined


def _starts(entries: Sequence[Mapping[int, float]]) -> array[int]:
    return _ints(accumulate(map(len, entries), initial=0))
