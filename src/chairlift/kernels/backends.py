"""Which backends there are: a file each, and one line here.

A backend's module has a function `make_backend(settings, machine)`. It is imported when it is chosen: the others may
need libraries that are not installed. Imports nothing heavy, since `--help` lists the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.kernels.backend import Backend
    from chairlift.machine import Machine


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend's code is, and what to say when it cannot be imported."""

    module: str
    missing: str = ""
    hint: str = ""


_BUILD = "build them with `pip install .` (needs a C++20 compiler), or use --backend reference, which is slow"

BACKENDS: Mapping[str, BackendEntry] = {
    "native": BackendEntry("chairlift.kernels.native", "the compiled kernels are missing", _BUILD),
    "reference": BackendEntry("chairlift.kernels.reference"),
}


def make_backend(name: str, settings: Any, machine: Machine) -> Backend:
    """The backend of this name on this machine.

    `settings` is the Config; each backend declares the fields that it reads. Raises ConfigError for a setting that the
    backend cannot honour, or when what it needs is not installed.
    """
    entry = BACKENDS[name]
    try:
        module = import_module(entry.module)
    except ImportError as error:
        missing = entry.missing or f"--backend {name} needs what is not installed"
        raise ConfigError(f"{missing}: {error}", hint=entry.hint) from None
    backend: Backend = module.make_backend(settings, machine)
    return backend
