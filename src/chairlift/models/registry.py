"""Which architectures are served, and how a file's metadata becomes a `ModelSpec`, every number and tensor checked.

Nothing that changes the arithmetic is ignored: a key or tensor of the model that this code does not know is refused by
name. Owns the one decision about tied embeddings. Knows nothing of file offsets or of how weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from chairlift.errors import ModelError
from chairlift.kernels.ops import Forward
from chairlift.models import llama, quant, qwen2, qwen3
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"


class ModelFile(Protocol):
    """What is read of a file: its metadata and its tensors by name."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Keys as the file has them."""

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        """Nothing decoded."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model file: its forward function, the tensors of a layer, and which lanes rotate together."""

    forward: Forward
    layer_shapes: Callable[[ModelSpec, LayerSpec], dict[str, tuple[int, ...]]]
    rope_style: Literal["interleaved", "halves"]


_FAMILIES = {
    "llama": Family(llama.forward, llama.layer_shapes, llama.ROPE_STYLE),
    "qwen2": Family(qwen2.forward, qwen2.layer_shapes, qwen2.ROPE_STYLE),
    "qwen3": Family(qwen3.forward, qwen3.layer_shapes, qwen3.ROPE_STYLE),
}

_READ_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
    }
)
_HARMLESS_KEYS = frozenset(
    {
        "vocab_size",  # the embedding table says it
        "tensor_data_layout",
        "rope.scaling.original_context_length",  # only YaRN and LongRoPE compute with it
        "rope.scaling.finetuned",
    }
)
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
"""Keys that would change the arithmetic, and the values with which they do not."""

_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 20
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
_MAX_VOCAB = 1 << 22
_MAX_CONTEXT = 1 << 26


def architectures() -> list[str]:
    """The values of `general.architecture` that are served."""
    return sorted(_FAMILIES)


def forward_for(architecture: str) -> Forward:
    """The model file's forward function. ModelError lists what is served when this is not."""
    return _family(architecture).forward


def read_spec(file: ModelFile) -> ModelSpec:
    """Reads and checks all that the file says of its model; nothing is loaded.

    ModelError names the key or tensor that is missing, out of range, of the wrong shape or type, or that this code
    would have to ignore.
    """
    keys = _Keys(file.metadata, file.tensors)
    family = _family(keys.architecture)
    keys.refuse_unknown()
    hidden = keys.count("embedding_length", _MAX_WIDTH)
    heads = keys.count("attention.head_count", _MAX_HEADS)
    kv_heads = keys.count("attention.head_count_kv", _MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.full('attention.head_count')} {heads} is not a multiple of the {kv_heads} key heads")
    even_share = None if hidden % heads else hidden // heads
    head_dim = keys.count("attention.key_length", _MAX_HEAD_DIM, default=even_share)
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=keys.count("attention.value_length", _MAX_HEAD_DIM, default=head_dim),
        rope=_rope(keys, head_dim, family.rope_style),
    )
    name = file.metadata.get("general.name")
    spec = ModelSpec(
        architecture=keys.architecture,
        name=name if isinstance(name, str) and name else keys.architecture,
        hidden_size=hidden,
        ffn_size=keys.count("feed_forward_length", _MAX_WIDTH),
        vocab_size=_vocab_size(file),
        context_length=_context_length(keys),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", upper=1.0),
        layers=(layer,) * keys.count("block_count", _MAX_LAYERS),
    )
    _check_tensors(spec, file.tensors)
    return spec


def model_tensors(spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The weights by the names that `forward` looks up, ready for `Backend.load`.

    A tied model has no `output.weight`: the name then stands for the very object of `token_embd.weight`, so a backend
    sees by identity that it need not pack it twice.
    """
    chosen = {name: tensors[name] for name in weight_names(spec) if name != HEAD}
    return chosen | {HEAD: tensors.get(HEAD, tensors[EMBEDDING])}


def weight_names(spec: ModelSpec) -> list[str]:
    """Names that `forward` looks up, in the order it first uses them."""
    return list(_weight_shapes(spec))


def _family(architecture: str) -> Family:
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"model architecture {architecture!r} is not supported", hint=f"supported: {', '.join(architectures())}"
        )
    return family


@dataclass(frozen=True, slots=True)
class _Keys:
    """Checked access to the `{architecture}.` keys."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelError("the file's metadata has no general.architecture")
        return value

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        return self.metadata.get(self.full(key))

    def count(self, key: str, limit: int, *, default: int | None = None) -> int:
        """A whole number in [1, limit]."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"the file's metadata has no {self.full(key)}")
        if isinstance(value, list):
            raise ModelError(f"{self.full(key)} has one value a layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ModelError(f"{self.full(key)} is {_shown(value)}; it must be a whole number from 1 to {limit}")
        return value

    def number(self, key: str, *, upper: float, default: float | None = None) -> float:
        """A finite number in (0, upper]."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"the file's metadata has no {self.full(key)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= upper:
            raise ModelError(f"{self.full(key)} is {_shown(value)}; it must be above 0 and at most {upper:g}")
        return float(value)

    def refuse_unknown(self) -> None:
        prefix = f"{self.architecture}."
        for full, value in self.metadata.items():
            key = full.removeprefix(prefix)
            if key == full or key in _READ_KEYS or key in _HARMLESS_KEYS:
                continue
            if key in _NEUTRAL_VALUES and value in _NEUTRAL_VALUES[key]:
                continue
            raise ModelError(
                f"{full} = {_shown(value)} is not supported", hint="ignoring it could give wrong answers without a sign"
            )


def _vocab_size(file: ModelFile) -> int:
    """Rows of the embedding table; the token list, where there is one, must agree, or ids and rows would part."""
    table = file.tensors.get(EMBEDDING)
    if table is None:
        raise ModelError(f"the file has no tensor {EMBEDDING}")
    rows = table.shape[0] if len(table.shape) == 2 else 0
    if not 1 <= rows <= _MAX_VOCAB:
        raise ModelError(f"tensor {EMBEDDING} has shape {table.shape}; it must have 1 to {_MAX_VOCAB} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ModelError(f"tokenizer.ggml.tokens has {len(tokens)} entries, but tensor {EMBEDDING} has {rows} rows")
    return rows


def _context_length(keys: _Keys) -> int:
    """Positions served. Within a sliding window every earlier position is visible, so plain attention is exact."""
    context = keys.count("context_length", _MAX_CONTEXT)
    if keys.get("attention.sliding_window") == 0:
        return context
    return min(context, keys.count("attention.sliding_window", _MAX_CONTEXT, default=context))


def _rope(keys: _Keys, head_dim: int, style: Literal["interleaved", "halves"]) -> RopeSpec:
    dim = keys.count("rope.dimension_count", head_dim, default=head_dim)
    if dim % 2:
        raise ModelError(f"{dim} lanes cannot rotate in pairs: {keys.full('rope.dimension_count')} must be even")
    return RopeSpec(
        dim=dim,
        theta=keys.number("rope.freq_base", upper=1e15, default=10000.0),
        style=style,
        scale=_rope_scale(keys),
        factors=_rope_factors(keys.tensors.get(ROPE_FACTORS), dim),
    )


def _rope_scale(keys: _Keys) -> float:
    """Linear position scaling (Chen et al. 2023); a factor without a type is linear, as before the type existed."""
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise ModelError(
            f"{keys.full('rope.scaling.type')} {_shown(kind)} is not supported",
            hint="supported: none, linear, and frequency factors in the file (rope_freqs.weight, as Llama 3 has)",
        )
    key = "rope.scaling.factor" if keys.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "none" or keys.get(key) == 0:
        return 1.0
    return 1.0 / keys.number(key, upper=1e6, default=1.0)


def _rope_factors(tensor: RawTensor | None, dim: int) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if tensor.shape != (dim // 2,) or tensor.type_name != "F32":
        raise ModelError(
            f"tensor {ROPE_FACTORS} is {tensor.type_name} of shape {tensor.shape}; {(dim // 2,)} in F32 is needed"
        )
    factors = quant.dequantise(tensor)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelError(f"tensor {ROPE_FACTORS} has factors that are not positive and finite")
    return tuple(factors.tolist())


def _weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    family = _family(spec.architecture)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in family.layer_shapes(spec, layer).items()}
    return shapes | {"output_norm.weight": (spec.hidden_size,), HEAD: (spec.vocab_size, spec.hidden_size)}


def _check_tensors(spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> None:
    shapes = _weight_shapes(spec)
    unknown = [name for name in tensors if name not in shapes and name != ROPE_FACTORS]
    if unknown:
        raise ModelError(
            f"the file has {_some(unknown)} that a {spec.architecture} model does not use",
            hint="ignoring them could give wrong answers without a sign",
        )
    missing = [name for name in shapes if name not in tensors and name != HEAD]
    if missing:
        raise ModelError(f"the file has no {_some(missing)}, which a {spec.architecture} model needs")
    for name, shape in shapes.items():
        if name in tensors:
            _check_tensor(tensors[name], shape)


def _check_tensor(tensor: RawTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(f"tensor {tensor.name} has shape {tensor.shape}; its model needs {shape}")
    supported = quant.supported_types() if len(shape) == 2 else ["F32", "F16", "BF16"]
    if tensor.type_name not in supported:
        raise ModelError(
            f"tensor {tensor.name} has type {tensor.type_name}, which is not supported",
            hint=f"supported: {', '.join(supported)}",
        )


def _some(names: list[str], most: int = 3) -> str:
    """As many names as a line holds; quoted, since they may be anything."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:most]))}{more}"


def _shown(value: object) -> str:
    """A foreign value in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
