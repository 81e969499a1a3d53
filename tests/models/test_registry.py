"""The registry: which families there are, and which tensors they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chairlift.errors import ModelError
from chairlift.models import registry
from chairlift.models.quant import decode
from chairlift.models.spec import ModelSpec, RawPart, RawTensor
from support.memory_checkpoint import MemoryCheckpoint, raw_tensor
from support.tiny_gguf import Shape


def model(architecture: str = "llama", *, tied: bool = False) -> tuple[ModelSpec, dict[str, RawTensor]]:
    """A tiny model's spec and tensors."""
    checkpoint = MemoryCheckpoint(Shape(architecture, tied=tied), Path())
    return checkpoint.spec, dict(checkpoint.tensors)


def test_a_tied_head_is_the_very_embedding() -> None:
    """A tied table packed twice, or an untied head that is passed over."""
    spec, tensors = model(tied=True)
    names = registry.weight_names(spec)
    assert names == registry.weight_names(model()[0])
    weights = registry.model_tensors(spec, tensors)
    assert weights["output.weight"] is weights["token_embd.weight"]
    spec, tensors = model()
    weights = registry.model_tensors(spec, tensors)
    assert weights["output.weight"] is tensors["output.weight"]
    assert list(weights) == names


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    """A KeyError for a model of another architecture."""
    with pytest.raises(ModelError, match=r"'gemma2' is not supported.*llama, qwen2, qwen3"):
        registry.forward_for("gemma2")


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("blk.0.attn_q.bias", (64,), "'blk.0.attn_q.bias' that a llama model does not use"),
        ("blk.1.ffn_gate_exps.weight", (4, 96, 64), "ffn_gate_exps"),
        ("rope_factors_long.weight", (8,), "rope_factors_long"),
        ("line\nbreak", (1,), r"line\\nbreak"),
        ("blk.2.attn_q.weight", (64, 64), "blk.2"),
        ("blk.1.attn_k.weight", (64, 32), r"attn_k.weight has shape \(64, 32\); its model needs \(32, 64\)"),
        ("output.weight", (270, 64), "output.weight has shape"),
        ("output_norm.weight", (65,), "output_norm.weight has shape"),
        ("token_embd.weight", (271,), "token_embd.weight has shape"),
    ],
)
def test_tensors_are_checked_before_anything_is_loaded(name: str, shape: tuple[int, ...], says: str) -> None:
    """A foreign tensor that is silently left out, or a transposed one found in the middle of loading."""
    spec, tensors = model()
    tensors[name] = raw_tensor(name, np.ones(shape, np.float32))
    with pytest.raises(ModelError, match=says):
        registry.check_tensors(spec, tensors)


def test_missing_tensors_are_named() -> None:
    """A truncated download that is found at the first request."""
    spec, tensors = model("qwen2")
    for layer, name in ((0, "attn_q.bias"), (1, "ffn_up.weight")):
        del tensors[f"blk.{layer}.{name}"]
    with pytest.raises(ModelError, match=r"no tensors 'blk.0.attn_q.bias', 'blk.1.ffn_up.weight', which a qwen2"):
        registry.check_tensors(spec, tensors)


@pytest.mark.parametrize(("name", "type_name"), [("blk.0.ffn_up.weight", "Q2_K"), ("blk.0.attn_norm.weight", "Q8_0")])
def test_weight_types_are_checked(name: str, type_name: str) -> None:
    """A format that cannot be decoded found after a minute of loading the others."""
    spec, tensors = model()
    tensors[name] = RawTensor(name, tensors[name].shape, type_name, np.zeros(1, np.uint8))
    with pytest.raises(ModelError, match=f"{name} has type {type_name}, which is not supported"):
        registry.check_tensors(spec, tensors)


def test_a_tensor_in_parts_is_refused_by_name() -> None:
    """Codes decoded as if they were weights, because their scales lie in another array that nobody looks at."""
    spec, tensors = model()
    name = "blk.0.ffn_up.weight"
    scales = RawPart((96, 2), "F16", np.zeros(384, np.uint8))
    codes = RawTensor(name, (96, 64), "GPTQ", np.zeros(3072, np.uint8), {"scales": scales, "zeros": scales})
    assert codes.num_bytes == 3072 + 2 * 384
    with pytest.raises(ModelError, match=f"{name} has type GPTQ, which is not supported"):
        registry.check_tensors(spec, tensors | {name: codes})
    whole = tensors[name]
    assert (whole.parts, whole.num_bytes) == ({}, whole.data.nbytes)
    foreign = RawTensor(name, whole.shape, whole.type_name, whole.data, {"scales": scales})
    with pytest.raises(ModelError, match=f"{name} has 'scales' beside its data, which no F32 tensor has"):
        registry.check_tensors(spec, tensors | {name: foreign})
    with pytest.raises(ModelError, match=f"{name}' has 'scales' beside its data, as no F32 has"):
        decode(foreign)
