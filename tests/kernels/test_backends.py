"""The table of backends, and a backend that is no CPU: one new module and one line plug it in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chairlift import boot, card, config
from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.engine.sampling_params import SamplingParams
from chairlift.errors import ConfigError, DoesNotFit
from chairlift.kernels import backends
from chairlift.kernels.backend import BackendFacts, LoadSpec, MemoryView, Model
from chairlift.kernels.backends import BACKENDS, BackendEntry, make_backend
from chairlift.kernels.reference import ReferenceBackend
from chairlift.machine import Machine, detect
from chairlift.models.spec import ModelSpec, RawTensor
from chairlift.session import Session

MIB = 1024**2


class ToyBackend:
    """A device with memory of its own; its arithmetic is the reference's."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes

    @property
    def step_tokens(self) -> int:
        return 512

    def facts(self, machine: Machine) -> BackendFacts:
        return BackendFacts("toy device 0, float32", "toy", {"device": "toy:0"}, {"matmul": "f32"}, ("a toy",))

    def memory(self, machine: Machine) -> MemoryView:
        return MemoryView(self._memory_bytes, "the device", "use a larger toy")

    def packed_bytes(self, tensors: Iterable[RawTensor]) -> int:
        return sum(4 * tensor.num_elements for tensor in tensors)

    def working_bytes(self, spec: ModelSpec, max_rows: int) -> int:
        return 128 * MIB + max_rows * spec.hidden_size

    def read_speed(self, file: Path) -> float:
        return 1e12

    def load(self, load: LoadSpec) -> Model:
        return ReferenceBackend().load(load)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Plugs the toy in: its module, and its line in the table."""

    def plug_in(memory_bytes: int) -> None:
        module: Any = ModuleType("toy_backend")
        module.make_backend = lambda settings, machine: ToyBackend(memory_bytes)
        monkeypatch.setitem(sys.modules, "toy_backend", module)
        monkeypatch.setattr(backends, "BACKENDS", {**BACKENDS, "toy": BackendEntry("toy_backend")})

    return plug_in


def answer(loaded: Loaded) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Session(loaded) as session:
        return "".join(output.text for output in session.stream(loaded.encode("abc"), params))


def test_a_backend_is_one_module_and_one_line(toy: Callable[[int], None], tiny_gguf: Callable[..., Path]) -> None:
    """A shared type that only a CPU can fill, or a second place that lists the backends."""
    toy(256 * MIB)
    asked = Config(model=str(tiny_gguf()), backend="toy")
    loaded = boot.load(asked)
    assert answer(loaded) == answer(boot.load(replace(asked, backend="reference")))
    assert loaded.plan.max_num_batched_tokens == 512
    assert loaded.fingerprint.endswith("-toy-bf16")
    said = card.facts(loaded)
    assert said["machine"] == {
        "device": "toy:0",
        "memory_available_bytes": 256 * MIB,
        "memory_limited_by": "the device",
        "bandwidth_bytes_per_s": 10**12,
        "matmul": "f32",
    }
    assert said["notes"][0] == "a toy"
    assert ("compute", "toy device 0, float32") in card.lines(loaded)


def test_a_backend_s_own_memory_is_what_the_plan_fills(
    toy: Callable[[int], None], tiny_gguf: Callable[..., Path]
) -> None:
    """Gigabytes of host memory planned with on a device that has none of them."""
    toy(64 * MIB)
    with pytest.raises(DoesNotFit, match=r"64.0 MiB available, limited by the device .*or use a larger toy"):
        boot.load(Config(model=str(tiny_gguf()), backend="toy"))


def test_a_backend_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback for a backend whose libraries are missing, or for the compiled kernels before they are built."""
    table = {
        "far": BackendEntry("no_such_module_anywhere"),
        "near": BackendEntry("no_such_module", "not built", "build"),
    }
    monkeypatch.setattr(backends, "BACKENDS", table)
    with pytest.raises(ConfigError, match="--backend far needs what is not installed: No module named"):
        make_backend("far", Config(), detect())
    with pytest.raises(ConfigError, match=r"not built: No module named .* \(build\)"):
        make_backend("near", Config(), detect())


def test_the_setting_offers_what_the_table_has() -> None:
    """A backend that exists and cannot be asked for."""
    assert config.SETTINGS["backend"].kind.choices == tuple(BACKENDS)
    assert isinstance(make_backend("reference", Config(), detect()), ReferenceBackend)
