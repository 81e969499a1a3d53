"""Malformed steps and programs: an error that says what is wrong, before anything is read, written or computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chairlift import _native
from chairlift.errors import EngineError
from chairlift.kernels.backend import BLOCK_SIZE, Model
from chairlift.kernels.native import NativeBackend
from chairlift.kernels.ops import MAX_TOP, StepArrays
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


def new_recording() -> _native.Recording:
    pool = _native.Pool(1)
    return _native.Recording("portable", pool, _native.make_cache("bf16", 2, [(2, 16)], pool), 4, 10)


def test_a_program_is_checked_as_it_is_recorded() -> None:
    """Operands that do not fit together, found out as a stray write in the first step."""
    recording = new_recording()
    record = recording.record
    wide, narrow, head = (0, 0, 64), (1, 0, 32), (3, 0, 16)
    rounded = (2, 0, 64)
    assert [recording.add_buffer(width, "f32") for width in (64, 32)] == [0, 1]
    assert [recording.add_buffer(64, "int16"), recording.add_buffer(16, "f32")] == [2, 3]
    vector = recording.add_vector([1.0] * 64)
    rope: dict[str, Any] = {"frequencies": [1.0] * 8, "style": "halves", "head_dim": 16}
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: recording.add_buffer(0, "f32"), "at least one lane"),
        (lambda: recording.add_buffer(64, "int4"), "f32, bf16, int8 or int16"),  # type: ignore[arg-type]
        (lambda: recording.add_buffer(40, "int8"), "whole groups of 32"),
        (lambda: recording.add_vector([]), "empty vector"),
        (lambda: record("rope", x=wide, out=wide, **{**rope, "frequencies": [1.0] * 9}), "wider than a head"),
        (lambda: record("rope", x=wide, out=wide, **{**rope, "frequencies": []}), "without pairs"),
        (lambda: record("rope", x=wide, out=wide, **{**rope, "style": "thirds"}), "interleaved or in halves"),
        (lambda: record("rope", x=wide, out=wide, **{**rope, "head_dim": 48}), "not whole heads"),
        (lambda: record("add", a=wide, b=narrow, out=wide), "widths differ"),
        (lambda: record("add", a=(0, 1, 64), b=wide, out=wide), "beyond the buffer"),
        (lambda: record("add", a=(9, 0, 64), b=wide, out=wide), "no such buffer"),
        (lambda: record("gated", gate=rounded, up=wide, activation="silu", out=wide), "f32 lanes"),
        (lambda: record("gated", gate=wide, up=wide, activation="tanh", out=wide), "no activation tanh"),
        (lambda: record("quantise", x=wide, out=wide), "not rounded"),
        (lambda: record("rms_norm", x=narrow, weight=vector, eps=1e-5, out=narrow), "does not divide"),
        (lambda: record("rms_norm", x=wide, weight=7, eps=1e-5, out=wide), "no such vector"),
        (lambda: record("write_kv", keys=narrow, values=narrow, layer=1), "no such layer"),
        (lambda: record("write_kv", keys=head, values=narrow, layer=0), "widths differ"),
        (lambda: record("attend", queries=(0, 0, 48), layer=0, scale=1.0, out=(0, 0, 48)), "do not divide"),
        (lambda: record("embed", table=0, out=wide), "no such matrix"),
        (lambda: record("add", a=wide, b=wide), "add lacks its operand out"),
        (lambda: record("add", a=wide, b=1.0, out=wide), "add's operand b is of another kind"),
        (lambda: record("embed", table=1 << 32, out=wide), "embed's operand table is beyond 31 bits"),
        (lambda: record("add", a=wide, b=wide, scale=2.0, out=wide), "add has no operand scale"),
        (lambda: record("conv", x=wide), "no op conv"),
        (lambda: recording.finish(), "ends with its logits"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_finished_recording_takes_nothing_more() -> None:
    """An op recorded into a program that runs already, or a null arena."""
    recording = new_recording()
    unit = np.eye(32, dtype=np.float32)[:10]
    table = recording.add_matrix(
        _native.pack([("F32", unit.view(np.uint8).reshape(-1), 10)], 32, _native.Pool(1), False)
    )
    x = (recording.add_buffer(32, "f32"), 0, 32)
    recording.record("embed", table=table, out=x)
    recording.record("logits", x=x, matrix=table, input="f32")
    with pytest.raises(ValueError, match="logits are the last op"):
        recording.record("embed", table=table, out=x)
    assert recording.finish().num_ops == 2
    for call in (recording.finish, lambda: recording.add_buffer(32, "f32"), lambda: recording.record("add")):
        with pytest.raises(ValueError, match="recording is finished"):
            call()


def test_limits_are_told_once() -> None:
    """The core's blocks or alternatives differ from what Python plans with: indices beyond their arrays."""
    assert _native.MAX_TOP == MAX_TOP
    assert _native.BLOCK_TOKENS == BLOCK_SIZE
