"""Writes fused nodes into a recording of the compiled core: places activations in buffers, packs weights once.

What is fused is decided in `fuse.py`; how an op is recorded, by its node; how it is computed, in the core.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from chairlift import _native
from chairlift.errors import ModelError
from chairlift.kernels.fuse import WeightKinds
from chairlift.kernels.record import NOTHING, Lanes, Node, Value
from chairlift.kernels.rounding import DType
from chairlift.models import quant
from chairlift.models.spec import RawTensor


class Placement:
    """Which lanes each value lives in. A buffer is used again after the last read of its values."""

    def __init__(self, add_buffer: Callable[[int, DType], int], nodes: Sequence[Node]) -> None:
        self._add_buffer = add_buffer
        self._last_read = {value: i for i, node in enumerate(nodes) for value in node.reads()}
        self._lanes: dict[Value, Lanes] = {}
        self._num_living: Counter[int] = Counter()
        self._kinds: dict[int, tuple[int, DType]] = {}
        self._free: dict[tuple[int, DType], list[int]] = {}

    def lanes(self, value: Value) -> Lanes:
        """Where a value that was placed lives."""
        return self._lanes[value]

    def place(self, values: Sequence[Value]) -> Lanes:
        """Gives values one buffer, side by side, and returns the whole of it."""
        kind = (sum(value.width for value in values), values[0].dtype)
        free = self._free.get(kind)
        buffer = free.pop() if free else self._add_buffer(*kind)
        self._kinds[buffer] = kind
        self._num_living[buffer] = len(values)
        first = 0
        for value in values:
            self._lanes[value] = (buffer, first, value.width)
            first += value.width
        return (buffer, 0, kind[0])

    def replace(self, old: Value, new: Value, at: int) -> Lanes | None:
        """Lets `new` take the lanes of `old` when node `at` is the last to read it and the two are alike; None else."""
        if self._last_read[old] != at or (old.width, old.dtype) != (new.width, new.dtype):
            return None
        self._lanes[new] = self._lanes.pop(old)
        return self._lanes[new]

    def place_outputs(self, node: Node, at: int) -> Lanes:
        """Where node `at` writes: over an input that it is the last to read, if the op can, else into a buffer."""
        if not node.outputs:
            return NOTHING
        over = node.overwrites()
        taken = self.replace(over, node.outputs[0], at) if over is not None else None
        return self.place(node.outputs) if taken is None else taken

    def release(self, values: Iterator[Value], at: int) -> None:
        """Frees what node `at` was the last to read; values whose lanes were taken over live on."""
        for value in set(values):
            if self._last_read[value] == at and value in self._lanes:
                buffer, _, _ = self._lanes.pop(value)
                self._num_living[buffer] -= 1
                if self._num_living[buffer] == 0:
                    self._free.setdefault(self._kinds[buffer], []).append(buffer)


class Emitter:
    """Writes nodes into a recording; packs each weight when a node first needs it."""

    def __init__(self, recording: _native.Recording, pool: _native.Pool, kinds: WeightKinds) -> None:
        self._recording = recording
        self._pool = pool
        self._kinds = kinds
        self._matrices: dict[tuple[int, ...], int] = {}
        self._vectors: dict[tuple[int, ...], int] = {}

    def emit(self, nodes: Sequence[Node]) -> None:
        """All nodes, in order."""
        placement = Placement(self._recording.add_buffer, nodes)
        for at, node in enumerate(nodes):
            inputs = [placement.lanes(value) for value in node.reads()]
            node.emit(self, inputs, placement.place_outputs(node, at))
            placement.release(node.reads(), at)

    def record(self, op: str, /, **operands: _native.Operand) -> None:
        """Records one op of the core."""
        self._recording.record(op, **operands)

    def input_dtype(self, weight: RawTensor) -> DType:
        """What a product with this weight takes."""
        return self._kinds.input_dtype(weight)

    def matrix(self, tensors: Sequence[RawTensor]) -> int:
        """The packed matrix of tensors stacked by rows; the same for the same tensors (tied embeddings)."""
        key = tuple(id(tensor) for tensor in tensors)
        if key not in self._matrices:
            parts = [(tensor.type_name, tensor.data, tensor.shape[0]) for tensor in tensors]
            mapped = all(_is_file_mapping(tensor.data) for tensor in tensors)
            try:
                packed = _native.pack(parts, tensors[0].shape[1], self._pool, mapped)
            except ValueError as error:
                raise ModelError(f"tensor {tensors[0].name!r} cannot be packed: {error}") from error
            self._matrices[key] = self._recording.add_matrix(packed)
        return self._matrices[key]

    def vector(self, tensors: Sequence[RawTensor]) -> int:
        """The vector of tensors laid end to end."""
        key = tuple(id(tensor) for tensor in tensors)
        if key not in self._vectors:
            values = np.concatenate([quant.dequantise(tensor).reshape(-1) for tensor in tensors])
            self._vectors[key] = self._recording.add_vector(values.tolist())
        return self._vectors[key]


def _is_file_mapping(data: object) -> bool:
    """Whether an array is a view into a memory-mapped file, whose pages can be given back after reading."""
    while isinstance(data, np.ndarray):
        data = data.base
    return isinstance(data.obj if isinstance(data, memoryview) else data, mmap.mmap)
