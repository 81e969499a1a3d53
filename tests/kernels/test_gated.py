"""Gates: each activation against its formula in float64, the core against the reference, and the laws bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from chairlift.kernels.backend import Backend, KVLayout, LoadSpec, Model
from chairlift.kernels.native import NativeBackend, available_isas
from chairlift.kernels.ops import F32, Activation
from chairlift.kernels.reference import ACTIVATIONS, ReferenceBackend
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec
from support.step_arrays import Part
from support.tiny_native import in_chunks, logits_of, whole

WIDTH, VOCAB = 100, 256
GATES = np.random.default_rng(0).normal(0, 3, (VOCAB, WIDTH)).astype(np.float32)
GATES[0, :10] = [-1e30, -200, -88.5, -10, -1e-30, 0, 1e-3, 10, 90, 1e18]
UPS = np.random.default_rng(1).normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)
FORMULAS: dict[Activation, Callable[[float], float]] = {
    "silu": lambda g: g / (1 + math.exp(-g)) if g > -700 else 0.0,
    "gelu_tanh": lambda g: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
}


def raw(name: str, array: F32) -> RawTensor:
    return RawTensor(name, array.shape, "F32", np.ascontiguousarray(array).view(np.uint8).reshape(-1))


def load(backend: Backend, activation: Activation) -> Model:
    """One gate as a model: the first WIDTH logits of a row are its lanes."""
    tensors = {
        "gate": raw("gate", GATES),
        "up": raw("up", UPS),
        "head": raw("head", np.eye(VOCAB, WIDTH, dtype=np.float32)),
    }

    def forward(ops: Any, spec: ModelSpec, weights: Any) -> Any:
        gated = ops.gated(ops.embed(weights["gate"]), ops.embed(weights["up"]), activation)
        return ops.logits(gated, weights["head"])

    layer = LayerSpec(1, 1, 16, 16, RopeSpec(16))
    spec = ModelSpec("gate", "gate", WIDTH, WIDTH, VOCAB, 512, 1e-5, (layer,))
    return backend.load(LoadSpec(spec, forward, tensors, KVLayout(20), VOCAB))


def test_each_activation_has_a_formula() -> None:
    """An activation that no test computes."""
    assert set(FORMULAS) == set(ACTIVATIONS) == set(get_args(Activation))


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("isa", ["reference", *available_isas()])
def test_a_gate_is_its_formula(isa: str, activation: Activation) -> None:
    """A wrong constant, an exponential that overflows, a lane beyond the last vector, or gate and up swapped."""
    model = load(ReferenceBackend() if isa == "reference" else NativeBackend(isa, threads=2), activation)
    got = whole(model, range(VOCAB), range(16))[:, :WIDTH]
    expected = np.vectorize(FORMULAS[activation])(GATES.astype(np.float64)) * UPS
    size = np.abs(GATES.astype(np.float64) * UPS)
    assert (np.abs(got - expected) <= 2e-6 * np.minimum(size, np.abs(expected) + 1)).all()


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("isa", ["reference", *available_isas()])
def test_company_and_chunks_change_no_bit(isa: str, activation: Activation) -> None:
    """A row whose last bits depend on the rows beside it, or on how many threads share them."""
    backend = ReferenceBackend() if isa == "reference" else NativeBackend(isa, threads=2)
    model, tokens = load(backend, activation), list(range(VOCAB))
    at_once = whole(model, tokens, range(16))
    assert (in_chunks(model, tokens, range(16), [1, 2, 13, 100, 140]) == at_once).all()
    beside = logits_of(model, [Part(tokens[:5], 0, [17], 5), Part(tokens[5:9], 0, [18], 4)])
    assert (beside == at_once[:9]).all()
