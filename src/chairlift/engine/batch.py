"""Step -> flat arrays: tokens, positions, slots, block tables, and the rows that need logits.

The last code that looks at requests; the runner and the kernels see arrays only. Every array is int32 unless said.

The arrays grow as `array.array` and become numpy's by view. Building them with numpy would take dozens of small calls,
each of which may release the interpreter to the event loop for up to a switch interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.engine.logit_rows import LogitRow, LogitRows, ints, ragged
from chairlift.engine.step import Chunk, Step
from chairlift.kernels.ops import StepArrays


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as arrays, and the purpose of each of its logit rows."""

    arrays: StepArrays
    logit_rows: list[LogitRow]


def build(step: Step, block_size: int) -> Batch:
    """Flattens a step. The rows of one request are consecutive; requests keep the step's order."""
    tokens, positions, slots, tables = ints(), ints(), ints(), ints()
    seq_starts, table_starts = ints([0]), ints([0])
    wanted = LogitRows()
    for index, chunk in enumerate(step.chunks):
        request, start, num_tokens = chunk
        stop = start + num_tokens
        table = request.block_table[: -(-stop // block_size)]
        if request.params.prompt_logprobs is not None:
            wanted.score(index, chunk, len(tokens))
        if num_tokens == 1:  # the common case, and several times as fast
            tokens.append(request.token_at(start))
            positions.append(start)
            slots.append(table[-1] * block_size + start % block_size)
        else:
            tokens.extend(request.tokens_between(start, stop))
            positions.extend(range(start, stop))
            for run in _slots(table, chunk, block_size):
                slots.extend(run)
        if stop == request.num_tokens:
            wanted.sample(index, request, len(tokens) - 1)
        tables.extend(table)
        seq_starts.append(len(tokens))
        table_starts.append(len(tables))
    bias_starts, bias_ids, bias_values = ragged(wanted.bias, "f")
    seen_starts, seen_ids, seen_counts = ragged(wanted.seen, "i")
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
    )
    return Batch(arrays, wanted.rows)


def _slots(table: Sequence[int], chunk: Chunk, block_size: int) -> Iterator[range]:
    """The pool slots of the chunk's positions: one range per block."""
    start = chunk.start
    while start < chunk.stop:
        index, offset = divmod(start, block_size)
        count = min(chunk.stop - start, block_size - offset)
        slot = table[index] * block_size + offset
        yield range(slot, slot + count)
        start += count
