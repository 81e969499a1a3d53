"""Models on the compiled core: packs the weights, turns the recorded ops into a Program, replays it once a step.

Owns which activation lives in which buffer. What is fused is decided in `record.py`, how an op is computed in the core.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from chairlift import _native
from chairlift.errors import ConfigError, DoesNotFit, EngineError, ModelError
from chairlift.kernels import record
from chairlift.kernels.backend import BLOCK_SIZE, LoadSpec
from chairlift.kernels.ops import MAX_TOP, SAMPLE_DTYPE, LogitResult, StepArrays
from chairlift.kernels.record import Node, Value, WeightKinds
from chairlift.kernels.rounding import ActivationBits, DType, input_dtype
from chairlift.models import quant
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec

Lanes = tuple[int, int, int]
"""Buffer, first lane, number of lanes."""

NOTHING: Lanes = (-1, 0, 0)


def available_isas() -> list[str]:
    """Instruction set levels that this build and this machine have, lowest first."""
    return _native.available_isas()


def best_isa() -> str:
    """The level that is chosen unless one is asked for."""
    return _native.best_isa()


class NativeBackend:
    """Loads models for the compiled core.

    `isa` forces an instruction set level (ConfigError when this machine does not have it); `threads` compute;
    `activation_bits` are those that MLP inputs are rounded to.
    """

    def __init__(self, isa: str | None = None, *, threads: int = 1, activation_bits: ActivationBits = 8) -> None:
        self.threads = threads
        self.activation_bits = activation_bits
        self.isa = best_isa() if isa is None else isa
        if self.isa not in available_isas():
            raise ConfigError(f"isa {self.isa!r} is not available here", hint=f"this machine has {available_isas()}")

    def load(self, load: LoadSpec) -> NativeModel:
        """Packs the weights in parallel and allocates pool and activations.

        Raises ModelError for a shape or type that the core does not take, DoesNotFit when memory is refused.
        """
        spec, kv = load.spec, load.kv
        for layer in spec.layers:
            if layer.value_dim != layer.head_dim:
                raise ModelError(
                    f"value heads of {layer.value_dim} lanes beside query heads of {layer.head_dim} are not supported"
                )
        if kv.block_size != BLOCK_SIZE:
            raise ConfigError(f"the native core's KV blocks hold {BLOCK_SIZE} tokens, not {kv.block_size}")
        recorder = record.Recorder(spec)
        load.forward(recorder, spec, load.tensors)
        with _errors_in_words(spec):
            start_s = time.perf_counter()
            pool = _native.Pool(self.threads)
            shapes = [(layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
            cache = _native.make_cache(kv.dtype, kv.num_blocks, shapes, pool)
            cached_s = time.perf_counter()
            recording = _native.Recording(self.isa, pool, cache, load.max_rows, spec.vocab_size)
            kinds = weight_kinds(self.activation_bits)
            Emitter(recording, pool, kinds).emit(record.fuse(recorder.nodes, kinds))
            program = recording.finish()
        load_s = {"KV": cached_s - start_s, "weights": time.perf_counter() - cached_s}
        return NativeModel(program, cache, spec.vocab_size, load_s)


def weight_kinds(activation_bits: ActivationBits) -> WeightKinds:
    """How the core holds and multiplies weights."""
    return WeightKinds(_native.layout_of, lambda weight: input_dtype(weight, activation_bits))


class NativeModel:
    """A loaded model: one Program and its KV pool."""

    def __init__(
        self, program: _native.Program, cache: _native.KVCache, vocab_size: int, load_s: Mapping[str, float]
    ) -> None:
        self.load_s = load_s
        self._program = program
        self._cache = cache
        self._vocab_size = vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._program.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pool takes."""
        return self._cache.nbytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations of a largest step, logits included."""
        return self._program.activation_bytes

    @property
    def num_ops(self) -> int:
        """Ops of a step after fusion."""
        return self._program.num_ops

    def run(self, step: StepArrays) -> LogitResult:
        """Runs one step; the GIL is free meanwhile. Raises EngineError when the step is malformed; nothing ran then."""
        count = len(step.logit_rows)
        result = LogitResult(
            tokens=np.empty(count, np.int32),
            logprobs=np.empty(count, np.float32),
            top_ids=np.empty((count, MAX_TOP), np.int32),
            top_logprobs=np.empty((count, MAX_TOP), np.float32),
            finite=np.empty(count, np.bool_),
            logits=np.empty((count, self._vocab_size), np.float32) if step.want_logits else None,
        )
        if step.sample.dtype != SAMPLE_DTYPE:
            raise EngineError(f"malformed step: sample is {step.sample.dtype}")
        try:
            result.seconds = self._program.run(step, step.sample.view(np.uint8), result)
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            raise EngineError(str(error)) from error
        return result


class Buffers:
    """Which lanes each value lives in. A buffer is used again once all of its values were read for the last time."""

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

    def release(self, values: Iterator[Value], at: int) -> None:
        """Frees what node `at` was the last to read; values whose lanes were taken over live on."""
        for value in set(values):
            if self._last_read[value] == at and value in self._lanes:
                buffer, _, _ = self._lanes.pop(value)
                self._num_living[buffer] -= 1
                if self._num_living[buffer] == 0:
                    self._free.setdefault(self._kinds[buffer], []).append(buffer)


class Emitter:
    """Writes fused nodes into a Program, packing each weight as it is first needed."""

    def __init__(self, recording: _native.Recording, pool: _native.Pool, kinds: WeightKinds) -> None:
        self._recording = recording
        self._pool = pool
        self._kinds = kinds
        self._matrices: dict[tuple[int, ...], int] = {}
        self._vectors: dict[tuple[int, ...], int] = {}
        self._emit: dict[record.Kind, Callable[[Node, list[Lanes], Lanes], None]] = {
            "embed": self._embed,
            "rms_norm": self._rms_norm,
            "quantise": lambda _, inputs, out: recording.record("quantise", x=inputs[0], out=out),
            "linear": self._linear,
            "rope": self._rope,
            "attend": self._attend,
            "swiglu": self._swiglu,
            "add": lambda _, inputs, out: recording.record("add", a=inputs[0], b=inputs[1], out=out),
            "logits": self._logits,
        }

    def emit(self, nodes: Sequence[Node]) -> None:
        """All nodes, in order."""
        buffers = Buffers(self._recording.add_buffer, nodes)
        for at, node in enumerate(nodes):
            inputs = [buffers.lanes(value) for value in node.reads()]
            out = NOTHING if node.kind == "logits" else place_output(buffers, node, at)
            self._emit[node.kind](node, inputs, out)
            buffers.release(node.reads(), at)

    def _embed(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        self._recording.record("embed", table=self._matrix(node.weights), out=out)

    def _rms_norm(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        self._recording.record("rms_norm", x=inputs[0], weight=self._vector(node.weights), eps=node.eps, out=out)

    def _linear(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        extra: dict[str, _native.Operand] = {}
        if node.biases:
            extra["bias"] = self._vector(node.biases)
        if node.residual is not None:
            extra["residual"] = inputs[1]
        self._recording.record("linear", x=inputs[0], matrix=self._matrix(node.weights), out=out, **extra)

    def _rope(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        rope = node.rope
        assert rope is not None
        turns: dict[str, _native.Operand] = {"frequencies": rope_frequencies(rope), "style": rope.style}
        self._recording.record("rope", x=inputs[0], head_dim=node.head_dim, out=out, **turns)

    def _attend(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        queries, keys, values = inputs
        scale = float(np.float32(1) / np.sqrt(np.float32(node.head_dim)))
        self._recording.record("write_kv", keys=keys, values=values, layer=node.layer)
        self._recording.record("attend", queries=queries, layer=node.layer, scale=scale, out=out)

    def _swiglu(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        self._recording.record("gated", gate=inputs[0], up=inputs[1], activation="silu", out=out)

    def _logits(self, node: Node, inputs: list[Lanes], out: Lanes) -> None:
        norm: dict[str, _native.Operand] = {}
        if len(node.weights) > 1:
            norm = {"norm": self._vector(node.weights[1:]), "eps": node.eps}
        head = node.weights[0]
        dtype = self._kinds.input_dtype(head)
        self._recording.record("logits", x=inputs[0], matrix=self._matrix([head]), input=dtype, **norm)

    def _matrix(self, tensors: Sequence[RawTensor]) -> int:
        """The packed matrix of tensors stacked by rows; the same tensors give the same one (tied embeddings)."""
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

    def _vector(self, tensors: Sequence[RawTensor]) -> int:
        """Vectors laid end to end."""
        key = tuple(id(tensor) for tensor in tensors)
        if key not in self._vectors:
            values = np.concatenate([quant.dequantise(tensor).reshape(-1) for tensor in tensors])
            self._vectors[key] = self._recording.add_vector(values.tolist())
        return self._vectors[key]


def rope_frequencies(rope: RopeSpec) -> list[float]:
    """Radians per position of each pair, as RopeSpec defines them."""
    pairs = rope.dim // 2
    factors = rope.factors or (1.0,) * pairs
    return [rope.scale * rope.theta ** (-2.0 * i / rope.dim) / factors[i] for i in range(pairs)]


def place_output(buffers: Buffers, node: Node, at: int) -> Lanes:
    """Over an input that ends here, where the op allows it, else in a buffer of its own."""
    over = node.residual if node.kind == "linear" and node.residual not in node.inputs else None
    if node.kind in {"rms_norm", "rope", "swiglu", "add"}:
        over = node.inputs[0]
    taken = buffers.replace(over, node.outputs[0], at) if over is not None else None
    return buffers.place(node.outputs) if taken is None else taken


def _is_file_mapping(data: object) -> bool:
    """Whether an array is a view into a memory-mapped file, whose pages can be given back after reading."""
    while isinstance(data, np.ndarray):
        data = data.base
    return isinstance(data.obj if isinstance(data, memoryview) else data, mmap.mmap)


@contextmanager
def _errors_in_words(spec: ModelSpec) -> Iterator[None]:
    """Turns the core's refusals into errors that say whose fault it is."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{spec.name} cannot run on the native core: {error}") from error
    except (RuntimeError, MemoryError) as error:
        raise DoesNotFit(str(error) or "the system refuses the memory that the model needs") from error
