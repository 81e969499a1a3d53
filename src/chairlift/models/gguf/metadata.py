"""What a GGUF file says of its model, as a `ModelSpec`: every number is checked, and no key is ignored.

A key that would change the arithmetic and that this code does not know is refused by name. Owns what only GGUF knows:
its keys, and how its converter laid out rotary pairs. The registry checks the tensors against the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from chairlift.errors import ModelError
from chairlift.models import quant, registry
from chairlift.models.registry import EMBEDDING
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec
from chairlift.text import quoted

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: Llama 3's frequency factors, which become part of `RopeSpec`."""

_INTERLEAVED = frozenset({"llama"})
"""Architectures whose rows of Q and K the converter permutes, so that lanes (2i, 2i + 1) rotate together. It leaves the
others as they were trained: lanes (i, i + dim/2)."""

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


def read_spec(metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> ModelSpec:
    """Reads and checks all that the file says of its model; decodes only the rotary factors.

    ModelError names the key or tensor that is missing, out of range, of the wrong shape or type, or that this code
    would have to ignore.
    """
    keys = _Keys(metadata, tensors)
    registry.family(keys.architecture)
    keys.refuse_unknown()
    hidden = keys.count("embedding_length", _MAX_WIDTH)
    layer = _layer(keys, hidden)
    context_length, context_note = _context(keys)
    name = metadata.get("general.name")
    spec = ModelSpec(
        architecture=keys.architecture,
        name=name if isinstance(name, str) and name else keys.architecture,
        hidden_size=hidden,
        ffn_size=keys.count("feed_forward_length", _MAX_WIDTH),
        vocab_size=_vocab_size(keys),
        context_length=context_length,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", upper=1.0),
        layers=(layer,) * keys.count("block_count", _MAX_LAYERS),
        context_note=context_note,
    )
    registry.check_tensors(spec, weights(tensors))
    return spec


def weights(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The file's tensors less the rotary factors."""
    return {name: tensor for name, tensor in tensors.items() if name != ROPE_FACTORS}


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
            raise ModelError(f"{self.full(key)} is {quoted(value)}; it must be a whole number from 1 to {limit}")
        return value

    def number(self, key: str, *, upper: float, default: float | None = None) -> float:
        """A finite number in (0, upper]."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"the file's metadata has no {self.full(key)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= upper:
            raise ModelError(f"{self.full(key)} is {quoted(value)}; it must be above 0 and at most {upper:g}")
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
                f"{full} = {quoted(value)} is not supported", hint="ignoring it could give wrong answers without a sign"
            )


def _layer(keys: _Keys, hidden: int) -> LayerSpec:
    """The one kind of layer that today's files have: GGUF writes a single value where all layers are alike."""
    heads = keys.count("attention.head_count", _MAX_HEADS)
    kv_heads = keys.count("attention.head_count_kv", _MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.full('attention.head_count')} {heads} is not a multiple of the {kv_heads} key heads")
    even_share = None if hidden % heads else hidden // heads
    head_dim = keys.count("attention.key_length", _MAX_HEAD_DIM, default=even_share)
    return LayerSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=keys.count("attention.value_length", _MAX_HEAD_DIM, default=head_dim),
        rope=_rope(keys, head_dim),
    )


def _vocab_size(keys: _Keys) -> int:
    """Rows of the embedding table. A token list of another length would give ids without a row, or rows without one."""
    table = keys.tensors.get(EMBEDDING)
    if table is None:
        raise ModelError(f"the file has no tensor {EMBEDDING}")
    rows = table.shape[0] if len(table.shape) == 2 else 0
    if not 1 <= rows <= _MAX_VOCAB:
        raise ModelError(f"tensor {EMBEDDING} has shape {table.shape}; it must have 1 to {_MAX_VOCAB} rows")
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ModelError(f"tokenizer.ggml.tokens has {len(tokens)} entries, but tensor {EMBEDDING} has {rows} rows")
    return rows


def _context(keys: _Keys) -> tuple[int, str]:
    """Positions that are served, and why they are fewer than the model was trained for ("" where they are not).

    Within a sliding window every earlier position is visible, so attention without a window is exact there.
    """
    trained = keys.count("context_length", _MAX_CONTEXT)
    if keys.get("attention.sliding_window") == 0:
        return trained, ""
    window = keys.count("attention.sliding_window", _MAX_CONTEXT, default=trained)
    if window >= trained:
        return trained, ""
    note = f"context is {window} of the {trained} tokens that the model was trained for: its attention has a sliding "
    return window, note + f"window of {window}, and a longer context is not supported"


def _rope(keys: _Keys, head_dim: int) -> RopeSpec:
    dim = keys.count("rope.dimension_count", head_dim, default=head_dim)
    if dim % 2:
        raise ModelError(f"{dim} lanes cannot rotate in pairs: {keys.full('rope.dimension_count')} must be even")
    style: Literal["interleaved", "halves"] = "interleaved" if keys.architecture in _INTERLEAVED else "halves"
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
            f"{keys.full('rope.scaling.type')} {quoted(kind)} is not supported",
            hint="supported: none, linear, and frequency factors in the file (rope_freqs.weight, as Llama 3 has)",
        )
    key = "rope.scaling.factor" if keys.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "none" or keys.get(key) == 0:
        return 1.0
    return 1.0 / keys.number(key, upper=1e6, default=1.0)


def _rope_factors(tensor: RawTensor | None, dim: int) -> tuple[float, ...]:
    """The divisors of each pair's frequency; empty where the file has none."""
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
