"""What a backend is: it gets a LoadSpec and gives a Model. One file per way of computing implements it.

Shared by all of them: nothing here is the CPU's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from chairlift.kernels.ops import Forward, LogitResult, StepArrays
from chairlift.models.spec import ModelSpec, RawTensor

KVDtype = Literal["bf16", "int8"]

BLOCK_SIZE = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The one pool: `num_blocks` blocks of `block_size` tokens over all layers, allocated and prefaulted once."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    dtype: KVDtype = "bf16"


class Model(Protocol):
    """A loaded model: packed weights, its KV pool, and the step function."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the packed weights take."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pool takes."""

    @property
    def load_s(self) -> Mapping[str, float]:
        """Seconds that the parts of loading took, in order, for the start card; empty when not told apart."""

    def run(self, step: StepArrays) -> LogitResult:
        """Runs one step; releases the GIL while it computes. Raises EngineError when the step itself is malformed."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What every backend needs to load a model. What one backend alone needs (threads, instruction set) is its own."""

    spec: ModelSpec
    forward: Forward
    tensors: Mapping[str, RawTensor]  # by the names that `forward` looks up; tied weights are one object
    kv: KVLayout
    max_rows: int  # most rows of any step


class Backend(Protocol):
    """A way of computing."""

    def load(self, load: LoadSpec) -> Model:
        """Packs the weights and allocates the KV pool.

        Raises ModelError for a shape or type that it does not take, DoesNotFit when memory is refused.
        """
