"""What a backend is: it says where it computes and how much memory it has, gets a LoadSpec and gives a Model.

One file per way of computing implements it; `backends.py` lists them. Nothing here is the CPU's own (that is `cpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from chairlift.kernels.ops import Forward, LogitResult, StepArrays
from chairlift.machine import Machine
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


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The memory that weights and KV are placed in."""

    available_bytes: int
    limited_by: str  # "the cgroup", "the machine": what an error names
    remedy: str  # how to get more of it: "give the machine or its cgroup more memory"


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a backend says of itself. `device` and `rounding` are JSON values, by names of the backend's own."""

    summary: str  # one line for the start card
    fingerprint: str  # all of the backend that can change an answer's bits; part of `system_fingerprint`
    device: Mapping[str, Any]  # what computes
    rounding: Mapping[str, Any]  # what is rounded to what
    notes: tuple[str, ...] = ()  # settings that it could not honour


class Backend(Protocol):
    """A way of computing."""

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that it handles well; the plan's default."""

    def facts(self, machine: Machine) -> BackendFacts:
        """What it is, for people, for programs and for the fingerprint."""

    def memory(self, machine: Machine) -> MemoryView:
        """The memory that it uses, before anything is loaded."""

    def packed_bytes(self, tensors: Iterable[RawTensor]) -> int:
        """Upper bound of the bytes that these weights take once loaded; each is given once."""

    def working_bytes(self, spec: ModelSpec, max_rows: int) -> int:
        """Upper bound of what it needs beside weights and KV for steps of that many rows, the process included."""

    def read_speed(self, file: Path) -> float:
        """Bytes/s that it reads weights with, measured on a model's file or known; the start card's ceiling."""

    def load(self, load: LoadSpec) -> Model:
        """Packs the weights and allocates the KV pool.

        Raises ModelError for a shape or type that it does not take, DoesNotFit when memory is refused.
        """
