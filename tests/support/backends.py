"""The ways of computing that this machine has: the reference, and the native core at every ISA level."""

from __future__ import annotations

from chairlift.kernels.backend import Backend
from chairlift.kernels.native import NativeBackend, available_isas
from chairlift.kernels.reference import ReferenceBackend

BACKENDS = ["reference", *available_isas()]


def make_backend(name: str, threads: int = 2) -> Backend:
    """A backend by its name in BACKENDS."""
    return ReferenceBackend() if name == "reference" else NativeBackend(name, threads=threads)
