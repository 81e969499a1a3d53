"""What the backends on the processor share: threads, the machine's memory, and how the start card describes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

from chairlift import cost
from chairlift.kernels.backend import BackendFacts, MemoryView
from chairlift.kernels.rounding import ActivationBits
from chairlift.machine import Machine, measure_bandwidth
from chairlift.models.spec import ModelSpec, RawTensor

LEAST_STEP_TOKENS, MOST_STEP_TOKENS = 128, 1024
THREAD_STEP_TOKENS = 64
"""Tokens of a step that each thread takes through a layer by itself: more no longer fit its cache (docs/log.md)."""
RUNTIME_BYTES = 128 * 1024**2
"""Room for Python, the tokenizer and requests, beside weights, KV and activations."""


class CPUSettings(Protocol):
    """The fields of the Config that these backends read."""

    @property
    def threads(self) -> int | None:
        """Threads that were asked for; None: as many as the machine grants."""

    @property
    def isa(self) -> str | None:
        """Instruction set level that was asked for; None: the fastest."""

    @property
    def activation_dtype(self) -> Literal["int8", "int16"]:
        """What MLP inputs are rounded to."""


class CPUBackend:
    """Base of the backends on the processor. A subclass adds `load`.

    `isa` names the arithmetic: an instruction set level, or "numpy". `activation_bits` are those that MLP inputs are
    rounded to. `notes` name settings that could not be honoured.
    """

    def __init__(
        self, isa: str, *, threads: int = 1, activation_bits: ActivationBits = 8, notes: tuple[str, ...] = ()
    ) -> None:
        self.isa = isa
        self.threads = threads
        self.activation_bits = activation_bits
        self._notes = notes

    @property
    def step_tokens(self) -> int:
        """What the threads' caches hold, within limits."""
        return max(LEAST_STEP_TOKENS, min(MOST_STEP_TOKENS, THREAD_STEP_TOKENS * self.threads))

    def facts(self, machine: Machine) -> BackendFacts:
        """Instruction set, threads and rounding, for the start card and the fingerprint."""
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'} ({machine.threads_reason})"
        return BackendFacts(
            summary=f"{self.isa}, {threads}, activations int{self.activation_bits}",
            fingerprint=f"{self.isa}-a{self.activation_bits}",
            device={"isa": self.isa, "threads": self.threads, "threads_reason": machine.threads_reason},
            rounding={"activation_bits": self.activation_bits},
            notes=self._notes,
        )

    def memory(self, machine: Machine) -> MemoryView:
        """The machine's own."""
        remedy = "give the machine or its cgroup more memory"
        return MemoryView(machine.memory_available_bytes, machine.memory_limited_by, remedy)

    def packed_bytes(self, tensors: Iterable[RawTensor]) -> int:
        """The bound that every packed layout keeps. The reference, which decodes to float32, takes more."""
        return cost.packed_weight_bytes(sum(tensor.num_bytes for tensor in tensors))

    def working_bytes(self, spec: ModelSpec, max_rows: int) -> int:
        """Python, the tokenizer and requests, and the activations of the largest step."""
        return RUNTIME_BYTES + cost.activation_bytes(spec, max_rows)

    def read_speed(self, file: Path) -> float:
        """Measured with as many threads as compute."""
        return measure_bandwidth(file, self.threads)


def wanted_bits(settings: CPUSettings) -> ActivationBits:
    """The bits that `--activation-dtype` asks for."""
    return 16 if settings.activation_dtype == "int16" else 8


def choose_threads(asked: int | None, machine: Machine) -> tuple[int, tuple[str, ...]]:
    """Threads to compute on, and notes: those asked for, but no more than there are processors."""
    if asked is None:
        return machine.threads, ()
    if asked > machine.num_cpus:
        note = f"threads lowered from {asked} to {machine.num_cpus}: no more processors in our affinity"
        return machine.num_cpus, (note,)
    if machine.quota is not None and asked > machine.quota:
        return asked, (f"{asked} threads exceed the cgroup's quota of {machine.quota:g}: expect throttling",)
    return asked, ()
