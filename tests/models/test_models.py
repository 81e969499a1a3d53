"""Model files against transformers' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from chairlift.kernels import reference
from chairlift.kernels.backend import KVDtype, KVLayout, LoadSpec
from chairlift.kernels.ops import F32, I32
from chairlift.models import registry
from chairlift.models.checkpoint import open_checkpoint
from support.memory_checkpoint import MemoryCheckpoint
from support.model_cases import CASES, TOKENS, write_case
from support.paths import FIXTURES
from support.step_arrays import Part, make_step
from support.tiny_gguf import Shape

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


class ExactCache(reference.Cache):
    """Keys and values kept in float32, so that only the model's arithmetic is compared."""

    def __init__(self, kv: KVLayout, num_heads: int, width: int) -> None:
        super().__init__(kv, num_heads, width)
        self._exact = self._data.astype(np.float32)

    def write(self, slots: I32, x: F32) -> None:
        self._exact[slots] = x

    def read(self, slots: npt.NDArray[np.integer]) -> reference.Kept:
        return reference.Kept(self._exact[slots])


def logits_of(path: Path, kv: KVDtype = "bf16") -> F32:
    """Logits of every position of TOKENS, computed in one step."""
    with open_checkpoint(path) as file:
        spec = file.spec
        tensors = registry.model_tensors(spec, file.tensors)
        forward = registry.forward_for(spec.architecture)
        model = reference.ReferenceBackend().load(LoadSpec(spec, forward, tensors, KVLayout(3, 16, kv), 64))
        logits = model.run(make_step([Part(TOKENS, 0, [2, 0, 1], len(TOKENS))])).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A model file that is nearly right: a norm, bias, rope style, scaling or head order that only blurs the text."""
    expected = np.load(FIXTURES / "models" / f"{name}.npz")["logits"]
    path = write_case(tmp_path / "model.gguf", CASES[name])
    largest = np.abs(expected).max()
    rounded = {kv: np.abs(logits_of(path, kv) - expected).max() / largest for kv in ("bf16", "int8")}
    monkeypatch.setattr(reference, "Cache", ExactCache)
    monkeypatch.setattr(reference, "to_bf16", lambda x: x)
    assert np.abs(logits_of(path) - expected).max() < 1e-5 * largest
    assert 1e-5 < rounded["bf16"] < 0.05, "sharp attention makes much of a rounded key"
    assert rounded["bf16"] < rounded["int8"] < 0.3


class Spy:
    """An op list that computes nothing."""

    def __getattr__(self, op: str) -> Callable[..., str]:
        return lambda *args, **settings: op


class Asked(Mapping[str, str]):
    """Any name is there; notes each that was looked up."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> str:
        self.names.append(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_asks_for_the_weights_that_were_checked(architecture: str) -> None:
    """A tensor that is used but not checked (a KeyError at load), or checked but forgotten in forward."""
    spec = MemoryCheckpoint(Shape(architecture), Path()).spec
    weights = Asked()
    registry.forward_for(architecture)(Spy(), spec, weights)
    assert sorted(weights.names) == sorted(registry.weight_names(spec))
