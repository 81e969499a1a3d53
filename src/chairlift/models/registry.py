"""Which model families are served, and whether a checkpoint's tensors are those that its family needs.

A family is a model file (`llama.py`, ...): its forward function and the tensors of a layer. A tensor that the family
does not use is refused by name. Owns the one decision about tied embeddings. Knows no container: a `Checkpoint` has
read the numbers before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chairlift.errors import ModelError
from chairlift.kernels.ops import Forward
from chairlift.models import llama, quant, qwen2, qwen3
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor
from chairlift.text import quoted_list

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """One model file: its forward function, and the tensors of a layer."""

    forward: Forward
    layer_shapes: Callable[[ModelSpec, LayerSpec], dict[str, tuple[int, ...]]]


_FAMILIES = {
    "llama": Family(llama.forward, llama.layer_shapes),
    "qwen2": Family(qwen2.forward, qwen2.layer_shapes),
    "qwen3": Family(qwen3.forward, qwen3.layer_shapes),
}


def architectures() -> list[str]:
    """Names of the families, as `ModelSpec.architecture` has them."""
    return sorted(_FAMILIES)


def family(architecture: str) -> Family:
    """The family of this name. ModelError lists the families when it is none of them."""
    found = _FAMILIES.get(architecture)
    if found is None:
        raise ModelError(
            f"model architecture {architecture!r} is not supported", hint=f"supported: {', '.join(architectures())}"
        )
    return found


def forward_for(architecture: str) -> Forward:
    """The family's forward function. Errors as for `family`."""
    return family(architecture).forward


def model_tensors(spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The weights by the names that `forward` looks up, ready for `Backend.load`.

    A tied model has no `output.weight`. The name then stands for the very object of `token_embd.weight`: a backend sees
    by identity that it need not pack the table twice.
    """
    chosen = {name: tensors[name] for name in weight_names(spec) if name != HEAD}
    return chosen | {HEAD: tensors.get(HEAD, tensors[EMBEDDING])}


def weight_names(spec: ModelSpec) -> list[str]:
    """Names that `forward` looks up, in the order it first uses them."""
    return list(_weight_shapes(spec))


def check_tensors(spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
    """Checks names, shapes and types before anything is loaded.

    ModelError names tensors that the family does not use or that are missing, and a shape or type that is wrong.
    """
    shapes = _weight_shapes(spec)
    unknown = [name for name in tensors if name not in shapes]
    if unknown:
        raise ModelError(
            f"the file has {_listed(unknown)} that a {spec.architecture} model does not use",
            hint="ignoring them could give wrong answers without a sign",
        )
    missing = [name for name in shapes if name not in tensors and name != HEAD]
    if missing:
        raise ModelError(f"the file has no {_listed(missing)}, which a {spec.architecture} model needs")
    for name, shape in shapes.items():
        if name in tensors:
            _check_tensor(tensors[name], shape)


def _weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    layer_shapes = family(spec.architecture).layer_shapes
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer_shapes(spec, layer).items()}
    return shapes | {"output_norm.weight": (spec.hidden_size,), HEAD: (spec.vocab_size, spec.hidden_size)}


def _check_tensor(tensor: RawTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(f"tensor {tensor.name} has shape {tensor.shape}; its model needs {shape}")
    supported = quant.supported_types() if len(shape) == 2 else ["F32", "F16", "BF16"]
    if tensor.type_name not in supported:
        raise ModelError(
            f"tensor {tensor.name} has type {tensor.type_name}, which is not supported",
            hint=f"supported: {', '.join(supported)}",
        )
    if tensor.parts:
        parts = quoted_list(sorted(tensor.parts))
        raise ModelError(f"tensor {tensor.name} has {parts} beside its data, which no {tensor.type_name} tensor has")


def _listed(names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {quoted_list(names)}"
