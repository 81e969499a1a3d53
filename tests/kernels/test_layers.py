"""Layers that differ in heads, head sizes, rotations and windows: each has its own records in the KV pool."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from chairlift import cost
from chairlift.errors import ModelError
from chairlift.kernels.backend import Backend, KVDtype, KVLayout, LoadSpec, Model
from chairlift.kernels.native import NativeBackend, available_isas
from chairlift.kernels.reference import ReferenceBackend
from chairlift.models.llama import forward, layer_shapes
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec
from support.step_arrays import Part
from support.tiny_native import in_chunks, logits_of, tokens_of, whole

LAYERS = (
    LayerSpec(4, 2, 16, 16, RopeSpec(16)),
    LayerSpec(3, 1, 40, 40, RopeSpec(24, 500.0, "halves"), window=9),
    LayerSpec(4, 4, 8, 8, RopeSpec(8), window=33),
    LayerSpec(4, 2, 16, 16, RopeSpec(16)),
)
SPEC = ModelSpec("llama", "layers that differ", 64, 96, 256, 512, 1e-5, LAYERS)
NUM_BLOCKS = 12
KV_DTYPES: list[KVDtype] = ["bf16", "int8"]


def raw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> RawTensor:
    values = 1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[1] ** -0.5
    return RawTensor(name, shape, "F32", values.astype(np.float32).view(np.uint8).reshape(-1))


def load(backend: Backend, kv: KVDtype, spec: ModelSpec = SPEC) -> Model:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (256, 64), "output_norm.weight": (64,), "output.weight": (256, 64)}
    for index, layer in enumerate(spec.layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer_shapes(spec, layer).items()}
    tensors = {name: raw(name, shape, rng) for name, shape in shapes.items()}
    return backend.load(LoadSpec(spec, forward, tensors, KVLayout(NUM_BLOCKS, dtype=kv), 64))


def backends() -> dict[str, Backend]:
    native: dict[str, Backend] = {isa: NativeBackend(isa, threads=2) for isa in available_isas()}
    return {"reference": ReferenceBackend()} | native


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", backends())
def test_the_laws_hold_for_layers_that_differ(name: str, kv: KVDtype) -> None:
    """A layer that writes into another's records, turns by another's angles, or is cut by another's schedule."""
    model = load(backends()[name], kv)
    a, b = tokens_of(1, 50), tokens_of(2, 20)
    alone = whole(model, a, [0, 1, 2, 3]), whole(model, b, [4, 5])
    assert (in_chunks(model, a, [9, 8, 7, 6], [1, 16, 20, 3, 10]) == alone[0]).all()
    first = logits_of(model, [Part(a[:30], 0, [5, 3], 30), Part(b[:7], 0, [10], 7)])
    second = logits_of(model, [Part(b[7:], 7, [10, 11], 13), Part(a[30:], 30, [5, 3, 0, 1], 20)])
    assert (np.concatenate([first[:30], second[13:]]) == alone[0]).all()
    assert (np.concatenate([first[30:], second[:13]]) == alone[1]).all()


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_the_core_computes_what_the_reference_does(kv: KVDtype) -> None:
    """A head size, a window or a rotation taken from the first layer."""
    tokens = tokens_of(3, 50)
    expected = whole(load(ReferenceBackend(), kv), tokens, range(4))
    for isa in available_isas():
        errors = np.abs(whole(load(NativeBackend(isa, threads=2), kv), tokens, range(4)) - expected).max(axis=1)
        assert np.median(errors) < 1e-3 * np.abs(expected).max()
        assert errors.max() < 3e-2 * np.abs(expected).max()
    same = dataclasses.replace(SPEC, layers=tuple(dataclasses.replace(layer, window=None) for layer in LAYERS))
    everything = whole(load(ReferenceBackend(), kv, same), tokens, range(4))
    assert (np.abs(everything - expected).max(axis=1) > 0.1)[9:].all()


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", backends())
def test_the_pool_is_what_the_plan_counts(name: str, kv: KVDtype) -> None:
    """A pool of the first layer's shape times the number of layers."""
    assert load(backends()[name], kv).kv_bytes == NUM_BLOCKS * 16 * cost.kv_bytes_per_token(SPEC, kv)


def test_values_narrower_than_keys_are_refused_in_any_layer() -> None:
    """Only the first layer looked at: a record with room for other values than are written."""
    layers = (*LAYERS[:2], dataclasses.replace(LAYERS[2], value_dim=16))
    with pytest.raises(ModelError, match="value heads of 16 lanes beside query heads of 8"):
        load(NativeBackend(), "bf16", dataclasses.replace(SPEC, layers=layers))
