"""What the backends on the processor make of settings and machine."""

from __future__ import annotations

import pytest

from chairlift.config import Config
from chairlift.errors import ConfigError
from chairlift.kernels import native, reference
from chairlift.kernels.backend import MemoryView
from chairlift.kernels.cpu import CPUBackend, choose_threads
from chairlift.machine import Machine


def box(num_cpus: int = 4, num_cores: int = 2, quota: float | None = None) -> Machine:
    return Machine(num_cpus, num_cores, quota, 2**34, 2**33, "the cgroup")


def test_threads_asked_for() -> None:
    """More threads than processors, or a setting that is ignored."""
    assert choose_threads(None, box()) == (2, ())
    assert choose_threads(1, box()) == (1, ())
    assert choose_threads(4, box()) == (4, ())
    threads, notes = choose_threads(64, box())
    assert threads == 4
    assert notes == ("threads lowered from 64 to 4: no more processors in our affinity",)
    threads, notes = choose_threads(3, box(quota=2.0))
    assert threads == 3
    assert notes == ("3 threads exceed the cgroup's quota of 2: expect throttling",)


@pytest.mark.parametrize(("threads", "tokens"), [(1, 128), (2, 128), (4, 256), (16, 1024), (96, 1024)])
def test_steps_grow_with_threads(threads: int, tokens: int) -> None:
    """Sixteen cores with eight tokens each."""
    assert CPUBackend("any", threads=threads).step_tokens == tokens


def test_memory_is_what_the_machine_grants() -> None:
    """The host's memory planned with inside a container."""
    remedy = "give the machine or its cgroup more memory"
    assert CPUBackend("any").memory(box()) == MemoryView(2**33, "the cgroup", remedy)


def test_settings_reach_the_backends() -> None:
    """A flag that one backend honours and the other forgets."""
    config = Config(threads=9, activation_dtype="int16")
    for backend, isa in ((native.make_backend(config, box()), native.best_isa()),
                         (reference.make_backend(config, box()), "numpy")):  # fmt: skip
        facts = backend.facts(box())
        assert facts.summary == f"{isa}, 4 threads (2 cores in our affinity (4 processors), no cgroup quota), " + (
            "activations int16"
        )
        assert facts.fingerprint == f"{isa}-a16"
        assert facts.notes == ("threads lowered from 9 to 4: no more processors in our affinity",)
    assert native.make_backend(Config(isa="portable"), box()).isa == "portable"
    with pytest.raises(ConfigError, match="--isa portable chooses among compiled kernels"):
        reference.make_backend(Config(isa="portable"), box())
    assert "1 thread (" in CPUBackend("any").facts(box()).summary
