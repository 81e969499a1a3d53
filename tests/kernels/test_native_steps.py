"""Malformed steps and programs: an error that says what is wrong, before anything is read, written or computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chairlift import _native
from chairlift.errors import EngineError
from chairlift.kernels.backend import Model
from chairlift.kernels.native import NativeBackend
from chairlift.kernels.ops import MAX_TOP, LogitResult, StepArrays
from conftest import TinyGGUF
from support.step_arrays import Part, make_step
from support.tiny_native import MAX_ROWS, NUM_BLOCKS, load, whole


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def good_step() -> StepArrays:
    return make_step([Part([1, 2, 3], 15, [0, 1], 2), Part([4], 0, [2])])


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGGUF) -> Model:
    return load(NativeBackend(), tiny_gguf())


MALFORMED: list[tuple[str, Any, str]] = [
    ("tokens", ints(1, 2, 271, 4), r"tokens\[2\] is 271"),
    ("tokens", ints(1, -1, 3, 4), r"tokens\[1\] is -1"),
    ("tokens", ints(), "it has no rows"),
    ("tokens", ints(*range(MAX_ROWS + 1)), "65 rows; the program was made for 64"),
    ("tokens", np.array([1, 2, 3, 4]), "tokens has another dtype"),
    ("tokens", ints(1, 0, 2, 0, 3, 0, 4, 0)[::2], "tokens has another dtype, shape or layout"),
    ("tokens", ints(1, 2, 3, 4).reshape(2, 2), "tokens has another dtype, shape or layout"),
    ("tokens", [1, 2, 3, 4], "tokens has another dtype"),
    ("positions", ints(15, 16, 17), "positions has 3 entries, not 4"),
    ("positions", ints(15, 16, 18, 0), "row 2 of sequence 0 does not follow"),
    ("positions", ints(15, 16, 17, -1), "row 3 of sequence 1 stands at a negative position"),
    ("positions", ints(15, 16, 17, 16), "row 3 of sequence 1 stands beyond its block table"),
    ("slots", ints(15, 16, 17, 33), "row 3 of sequence 1 does not write where its block table says"),
    ("slots", ints(15, 16, 17, NUM_BLOCKS * 16), r"slots\[3\] is 192"),
    ("block_tables", ints(0, 1, NUM_BLOCKS), r"block_tables\[2\] is 12"),
    ("block_tables", ints(0, -1, 2), r"block_tables\[1\] is -1"),
    ("block_tables", ints(0, 1), "table_starts does not run from 0 to 2"),
    ("seq_starts", ints(0, 3), "table_starts has 3 entries, not 2"),
    ("seq_starts", ints(0, 3, 3), "seq_starts has an entry of fewer than 1"),
    ("seq_starts", ints(1, 3, 4), "seq_starts does not run from 0 to 4"),
    ("seq_starts", ints(0, 3, 2**31 - 1), "seq_starts does not run from 0 to 4"),
    ("seq_starts", ints(0), "it has no sequences"),
    ("seq_starts", ints(), "it has no sequences"),
    ("table_starts", ints(0, 0, 3), "table_starts has an entry of fewer than 1"),
    ("logit_rows", ints(1, 1, 3), "logit_rows is not ascending"),
    ("logit_rows", ints(1, 2, 4), r"logit_rows\[2\] is 4"),
    ("logit_rows", ints(1, 2), "sample has 3 entries, not 2"),
    ("sample", np.zeros(3), "sample is float64"),
    ("bias_starts", ints(0, 0, 0, 1), "bias_starts does not run from 0 to 0"),
    ("bias_starts", ints(0, 0, 0), "bias_starts has 3 entries, not 4"),
    ("bias_ids", ints(1), "bias_starts does not run from 0 to 1"),
    ("bias_values", np.zeros(1, np.float32), "bias_values has 1 entries, not 0"),
    ("bias_values", np.zeros(0), "bias_values has another dtype"),
    ("seen_starts", ints(0, 1, 0, 0), "seen_starts has an entry of fewer than 0"),
    ("seen_counts", ints(1), "seen_counts has 1 entries, not 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), MALFORMED)
def test_malformed_steps_are_refused(model: Model, name: str, value: Any, message: str) -> None:
    """A wrong index that reads or writes what belongs to another request, or outside the pool."""
    before = whole(model, [5, 6], [3])
    with pytest.raises(EngineError, match=message):
        model.run(dataclasses.replace(good_step(), **{name: value}))
    model.run(good_step())
    assert (whole(model, [5, 6], [3]) == before).all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_top", 21, "num_top"),
        ("num_top", -2, "num_top"),
        ("target", 271, "target"),
        ("target", -2, "target"),
        ("temperature", np.nan, "temperature"),
        ("temperature", -1.0, "temperature"),
    ],
)
def test_malformed_sampling_records_are_refused(model: Model, field: str, value: float, message: str) -> None:
    """A record that makes the sampler write beyond its row."""
    step = good_step()
    step.sample[field][1] = value
    with pytest.raises(EngineError, match=message):
        model.run(step)


def test_ids_of_biases_and_seen_tokens_are_checked(model: Model) -> None:
    """A bias or penalty for a token beyond the vocabulary, written past the logits."""
    bias: dict[str, Any] = {
        "bias_starts": ints(0, 0, 0, 1),
        "bias_ids": ints(271),
        "bias_values": np.ones(1, np.float32),
    }
    with pytest.raises(EngineError, match=r"bias_ids\[0\] is 271"):
        model.run(dataclasses.replace(good_step(), **bias))
    seen: dict[str, Any] = {"seen_starts": ints(0, 0, 1, 1), "seen_ids": ints(-1), "seen_counts": ints(1)}
    with pytest.raises(EngineError, match=r"seen_ids\[0\] is -1"):
        model.run(dataclasses.replace(good_step(), **seen))


def test_two_rows_never_share_a_slot(model: Model) -> None:
    """Two sequences that write one block: which of them wins would depend on the threads."""
    with pytest.raises(EngineError, match="row 3 of sequence 1 writes a slot that another row writes"):
        model.run(make_step([Part([1, 2, 3], 0, [5]), Part([4], 2, [5])]))


def test_a_pool_has_a_thread() -> None:
    """Nobody there to do the work, or more threads than anybody meant."""
    assert _native.Pool(3).threads == 3
    for count in (0, -1, 5000):
        with pytest.raises(ValueError, match="1 to 1024 threads"):
            _native.Pool(count)


def new_program() -> _native.Program:
    pool = _native.Pool(1)
    return _native.Program("portable", pool, _native.make_cache("bf16", (1, 2, 2, 16), pool), 4, 10)


def test_a_program_is_checked_as_it_is_recorded() -> None:
    """Operands that do not fit together, found out as a stray write in the first step."""
    program = new_program()
    wide, narrow = program.add_buffer(64, "f32"), program.add_buffer(32, "f32")
    rounded = program.add_buffer(64, "int16")
    vector = program.add_vector([1.0] * 64)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: program.add_buffer(0, "f32"), "at least one lane"),
        (lambda: program.add_buffer(64, "int4"), "f32, bf16, int8 or int16"),  # type: ignore[arg-type]
        (lambda: program.add_buffer(40, "int8"), "whole blocks of 32"),
        (lambda: program.add_vector([]), "empty vector"),
        (lambda: program.add_rope([1.0] * 9, True), "wider than a head"),
        (lambda: program.add((wide, 0, 64), (narrow, 0, 32), (wide, 0, 64)), "widths differ"),
        (lambda: program.add((wide, 1, 64), (wide, 0, 64), (wide, 0, 64)), "beyond the buffer"),
        (lambda: program.add((9, 0, 64), (wide, 0, 64), (wide, 0, 64)), "no such buffer"),
        (lambda: program.swiglu((rounded, 0, 64), (wide, 0, 64), (wide, 0, 64)), "f32 lanes"),
        (lambda: program.quantise((wide, 0, 64), (wide, 0, 64)), "not rounded"),
        (lambda: program.rms_norm((narrow, 0, 32), vector, 1e-5, (narrow, 0, 32)), "does not divide"),
        (lambda: program.rms_norm((wide, 0, 64), 7, 1e-5, (wide, 0, 64)), "no such vector"),
        (lambda: program.write_kv((narrow, 0, 32), (narrow, 0, 32), 1), "no such layer"),
        (lambda: program.attend((wide, 0, 48), 0, (wide, 0, 48)), "do not divide"),
        (lambda: program.embed(0, (wide, 0, 64)), "no such matrix"),
        (lambda: program.finish(), "ends with its logits"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_unfinished_program_does_not_run() -> None:
    """A null arena."""
    result = LogitResult(
        tokens=np.zeros(3, np.int32),
        logprobs=np.zeros(3, np.float32),
        top_ids=np.zeros((3, MAX_TOP), np.int32),
        top_logprobs=np.zeros((3, MAX_TOP), np.float32),
        finite=np.zeros(3, np.bool_),
    )
    with pytest.raises(ValueError, match="not finished"):
        new_program().run(good_step(), good_step().sample.view(np.uint8), result)
