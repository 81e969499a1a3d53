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
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.step import Piece, Step
from chairlift.kernels.ops import I32, SAMPLE_DTYPE, StepArrays

SAMPLES = -1
"""The target of a row that chooses the next token; otherwise the prompt token whose log-probability is wanted."""
LogitRow = tuple[int, int]
"""What a row that needs logits is for: an index into Step.pieces, and a target."""

_NOTHING: Mapping[int, int] = {}
_RECORD = struct.Struct("@6f3i3IQ")  # SAMPLE_DTYPE


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as arrays, and its logit rows in the same order."""

    arrays: StepArrays
    logit_rows: list[LogitRow]


def build(step: Step, block_size: int, *, want_logits: bool = False) -> Batch:
    """Flattens a step. Rows of one request are consecutive; requests keep the step's order."""
    tokens, positions, slots, tables = _ints(), _ints(), _ints(), _ints()
    seq_starts, table_starts = _ints([0]), _ints([0])
    wanted = _Wanted()
    for index, piece in enumerate(step.pieces):
        request, start, num_tokens = piece
        stop = start + num_tokens
        table = request.block_table[: -(-stop // block_size)]
        if request.params.prompt_logprobs is not None:
            wanted.score(index, piece, len(tokens))
        if num_tokens == 1:  # the common case, and several times as fast
            tokens.append(request.token_at(start))
            positions.append(start)
            slots.append(table[-1] * block_size + start % block_size)
        else:
            tokens.extend(request.tokens_between(start, stop))
            positions.extend(range(start, stop))
            for run in _slots(table, piece, block_size):
                slots.extend(run)
        if stop == request.num_tokens:
            wanted.sample(index, request, len(tokens) - 1)
        tables.extend(table)
        seq_starts.append(len(tokens))
        table_starts.append(len(tables))
    bias_starts, bias_ids, bias_values = _ragged(wanted.bias, "f")
    seen_starts, seen_ids, seen_counts = _ragged(wanted.seen, "i")
    arrays = StepArrays(
        tokens=np.asarray(tokens),
        positions=np.asarray(positions),
        slots=np.asarray(slots),
        seq_starts=np.asarray(seq_starts),
        table_starts=np.asarray(table_starts),
        block_tables=np.asarray(tables),
        logit_rows=np.asarray(wanted.at),
        sample=wanted.records(),
        bias_starts=bias_starts,
        bias_ids=bias_ids,
        bias_values=bias_values,
        seen_starts=seen_starts,
        seen_ids=seen_ids,
        seen_counts=seen_counts,
        want_logits=want_logits,
    )
    return Batch(arrays, wanted.rows)


class _Wanted:
    """The rows that need logits, and what for; one entry of each list a row."""

    def __init__(self) -> None:
        self.rows: list[LogitRow] = []
        self.at = _ints()  # rows of the step
        self.bias: list[Mapping[int, float]] = []
        self.seen: list[Mapping[int, int]] = []
        self._records = bytearray()
        self._indices = array("I")

    def sample(self, index: int, request: Request, row: int) -> None:
        """The row chooses the next token."""
        self.rows.append((index, SAMPLES))
        self.at.append(row)
        self.bias.append(_bias(request))
        self.seen.append(request.seen() if request.params.has_penalties else _NOTHING)
        if not request.record:
            request.record = _sampling_record(request.params)
        self._records += request.record
        self._indices.append(len(request.output))

    def score(self, index: int, piece: Piece, first_row: int) -> None:
        """The row at position p tells the log-probability of token p + 1; after a preemption only what is missing."""
        request = piece.request
        known = max(1, len(request.prompt_logprobs))
        for position in range(max(piece.start, known - 1), min(piece.stop, request.num_prompt - 1)):
            row, target = first_row + position - piece.start, request.prompt[position + 1]
            self.rows.append((index, target))
            self.at.append(row)
            self.bias.append(_NOTHING)
            self.seen.append(_NOTHING)
            self._records += _target_record(request.params, target)
            self._indices.append(0)

    def records(self) -> npt.NDArray[Any]:
        """SAMPLE_DTYPE of all rows."""
        records = np.frombuffer(self._records, SAMPLE_DTYPE)
        records["index"] = np.asarray(self._indices)
        return records


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


def _sampling_record(params: SamplingParams) -> bytes:
    """All that a request asks of its tokens but the index, which each has of its own."""
    return _RECORD.pack(
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
        0,
        0,
        params.seed,
    )


def _target_record(params: SamplingParams, target: int) -> bytes:
    return _RECORD.pack(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, params.prompt_logprobs or 0, target, 0, 0, 0, 0)


def _ragged(entries: Sequence[Mapping[int, Any]], typecode: Literal["i", "f"]) -> tuple[I32, I32, npt.NDArray[Any]]:
    """Starts, keys and values, the last as that type."""
    starts = _ints(accumulate(map(len, entries), initial=0))
    keys = _ints()
    values: array[Any] = array(typecode)
    for entry in filter(None, entries):
        keys.extend(entry.keys())
        values.extend(entry.values())
    return np.asarray(starts), np.asarray(keys), np.asarray(values)


def _ints(values: Iterable[int] = ()) -> array[int]:
    return array("i", values)
