"""The rows of a step that need logits, and how each is sampled or scored, as flat arrays."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from chairlift.engine.request import Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.engine.step import Chunk
from chairlift.kernels.ops import I32, SAMPLE_DTYPE

SAMPLES = -1
"""The target of a row that chooses the next token. Other targets are prompt tokens whose log-probability is wanted."""
LogitRow = tuple[int, int]
"""The purpose of a row that needs logits: an index into Step.chunks, and a target."""

_NOTHING: Mapping[int, int] = {}
_RECORD = struct.Struct("@6f3i3IQ")  # SAMPLE_DTYPE


class LogitRows:
    """The rows that need logits, and their purposes; each list has one entry a row."""

    def __init__(self) -> None:
        self.rows: list[LogitRow] = []
        self.at = ints()  # index into the step's rows
        self.bias: list[Mapping[int, float]] = []
        self.seen: list[Mapping[int, int]] = []
        self._records = bytearray()
        self._indices = array("I")

    def sample(self, index: int, request: Request, row: int) -> None:
        """Adds a row that chooses the next token."""
        self.rows.append((index, SAMPLES))
        self.at.append(row)
        self.bias.append(_bias(request))
        self.seen.append(request.seen() if request.params.has_penalties else _NOTHING)
        self._records += _sampling_record(request.params)
        self._indices.append(len(request.output))

    def score(self, index: int, chunk: Chunk, first_row: int) -> None:
        """Adds rows that score a prompt: position p gives the log-probability of token p + 1, unless it is known."""
        request = chunk.request
        known = max(1, len(request.prompt_logprobs))
        for position in range(max(chunk.start, known - 1), min(chunk.stop, request.num_prompt - 1)):
            row, target = first_row + position - chunk.start, request.prompt[position + 1]
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


def _bias(request: Request) -> Mapping[int, float]:
    params = request.params
    if len(request.output) >= params.min_tokens:
        return params.logit_bias
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else request.eos_ids)
    return {**params.logit_bias, **dict.fromkeys(ends, -np.inf)}


def _sampling_record(params: SamplingParams) -> bytes:
    """How a request's tokens are sampled: a SAMPLE_DTYPE record without the output index, which each row has."""
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


def ragged(entries: Sequence[Mapping[int, Any]], typecode: Literal["i", "f"]) -> tuple[I32, I32, npt.NDArray[Any]]:
    """Entries laid end to end: where each starts, all keys, and all values as that type."""
    starts = ints(accumulate(map(len, entries), initial=0))
    keys = ints()
    values: array[Any] = array(typecode)
    for entry in filter(None, entries):
        keys.extend(entry.keys())
        values.extend(entry.values())
    return np.asarray(starts), np.asarray(keys), np.asarray(values)


def ints(values: Iterable[int] = ()) -> array[int]:
    """An array of int32 that can grow."""
    return array("i", values)
