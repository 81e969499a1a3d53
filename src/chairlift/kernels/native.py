"""Models on the compiled core: records a model file's ops into a Program of the core, which replays it once a step.

record.py   the model file's calls      ->  nodes, one type per op
fuse.py     nodes                       ->  fewer nodes
emit.py     nodes                       ->  a recording of the core: activations placed, weights packed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from chairlift import _native
from chairlift.errors import ConfigError, DoesNotFit, EngineError, ModelError
from chairlift.kernels.backend import BLOCK_SIZE, LoadSpec
from chairlift.kernels.cpu import CPUBackend, CPUSettings, choose_threads, wanted_bits
from chairlift.kernels.emit import Emitter
from chairlift.kernels.fuse import WeightKinds, fuse
from chairlift.kernels.ops import MAX_TOP, SAMPLE_DTYPE, LogitResult, StepArrays
from chairlift.kernels.record import Recorder
from chairlift.kernels.rounding import ActivationBits, input_dtype
from chairlift.machine import Machine
from chairlift.models.spec import ModelSpec


def available_isas() -> list[str]:
    """Instruction set levels that this build and this machine have, lowest first."""
    return _native.available_isas()


def best_isa() -> str:
    """The level that is chosen unless one is asked for."""
    return _native.best_isa()


class NativeBackend(CPUBackend):
    """Loads models for the compiled core.

    `isa` forces an instruction set level (ConfigError when this machine does not have it); `threads` compute;
    `activation_bits` are those that MLP inputs are rounded to.
    """

    def __init__(
        self,
        isa: str | None = None,
        *,
        threads: int = 1,
        activation_bits: ActivationBits = 8,
        notes: tuple[str, ...] = (),
    ) -> None:
        isa = best_isa() if isa is None else isa
        super().__init__(isa, threads=threads, activation_bits=activation_bits, notes=notes)
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
        recorder = Recorder(spec)
        load.forward(recorder, spec, load.tensors)
        with _errors_in_words(spec):
            start_s = time.perf_counter()
            pool = _native.Pool(self.threads)
            shapes = [(layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
            cache = _native.make_cache(kv.dtype, kv.num_blocks, shapes, pool)
            cached_s = time.perf_counter()
            recording = _native.Recording(self.isa, pool, cache, load.max_rows, spec.vocab_size)
            kinds = weight_kinds(self.activation_bits)
            Emitter(recording, pool, kinds).emit(fuse(recorder.nodes, kinds))
            program = recording.finish()
        load_s = {"KV": cached_s - start_s, "weights": time.perf_counter() - cached_s}
        return NativeModel(program, cache, spec.vocab_size, load_s)


def make_backend(settings: CPUSettings, machine: Machine) -> NativeBackend:
    """The backend for these settings. ConfigError for an instruction set that this machine lacks."""
    threads, notes = choose_threads(settings.threads, machine)
    return NativeBackend(settings.isa, threads=threads, activation_bits=wanted_bits(settings), notes=notes)


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


@contextmanager
def _errors_in_words(spec: ModelSpec) -> Iterator[None]:
    """Turns the core's refusals into errors that say whose fault it is."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{spec.name} cannot run on the native core: {error}") from error
    except (RuntimeError, MemoryError) as error:
        raise DoesNotFit(str(error) or "the system refuses the memory that the model needs") from error
