"""Small models whose weights are a formula, in the names of transformers and in those of GGUF.

`fixtures/make_model_fixtures.py` gives them to transformers and keeps its logits; `test_models.py` runs them here. The
formula is exact integer arithmetic, so that both see the same bits for ever, and no weights need to be stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.tiny_gguf import write_gguf

F32 = npt.NDArray[np.float32]

VOCAB = 96
NUM_TOKENS = 40
TOKENS = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(NUM_TOKENS)]
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model. `metadata` and `rope_freqs` are what its GGUF has beyond the plain dimensions."""

    architecture: str
    tied: bool = False
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    layers: int = 2
    theta: float = 10000.0
    eps: float = 1e-5
    metadata: dict[str, Any] = field(default_factory=dict)
    rope_freqs: bool = False


CASES = {
    "llama": Case("llama"),
    "llama3": Case("llama", tied=True, theta=500000.0, rope_freqs=True),
    "llama_linear": Case(
        "llama", kv_heads=1, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    ),
    "mistral": Case("llama", head_dim=16, kv_heads=4, metadata={"llama.attention.sliding_window": NUM_TOKENS}),
    "qwen2": Case("qwen2", tied=True, theta=1e6, eps=1e-3),
    "qwen3": Case("qwen3", head_dim=16, theta=1e6, eps=1e-3),
}

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def noise(shape: tuple[int, ...], seed: int) -> F32:
    """Values in [-1, 1): a multiplicative hash of the index, exact in float32."""
    index = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(seed << 20)
    mixed = index * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(41)).astype(np.float32) / np.float32(2**22) - 1).reshape(shape)


def hf_weights(case: Case) -> dict[str, F32]:
    """The state dict, by the names and in the layout of transformers."""
    q, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, case.hidden)}
    for layer in range(case.layers):
        part = {
            "input_layernorm.weight": (case.hidden,),
            "self_attn.q_proj.weight": (q, case.hidden),
            "self_attn.k_proj.weight": (kv, case.hidden),
            "self_attn.v_proj.weight": (kv, case.hidden),
            "self_attn.o_proj.weight": (case.hidden, q),
            "post_attention_layernorm.weight": (case.hidden,),
            "mlp.gate_proj.weight": (case.ffn, case.hidden),
            "mlp.up_proj.weight": (case.ffn, case.hidden),
            "mlp.down_proj.weight": (case.hidden, case.ffn),
        }
        if case.architecture == "qwen2":
            part |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        if case.architecture == "qwen3":
            part |= {f"self_attn.{name}_norm.weight": (case.head_dim,) for name in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    shapes["model.norm.weight"] = (case.hidden,)
    if not case.tied:
        shapes["lm_head.weight"] = (VOCAB, case.hidden)
    return {name: _fill(name, shape, seed) for seed, (name, shape) in enumerate(shapes.items(), start=1)}


def _fill(name: str, shape: tuple[int, ...], seed: int) -> F32:
    """Scales that keep activations near 1 and make attention sharp enough to notice a wrong position."""
    x = noise(shape, seed)
    if "norm" in name:
        return np.float32(1) + np.float32(0.25) * x
    if name.endswith("bias") or "embed" in name:
        return x
    gain = 3.0 if "q_proj" in name or "k_proj" in name else 2.0
    return x * np.float32(gain / 2 ** round(math.log2(shape[1]) / 2))


def write_case(path: Path, case: Case) -> Path:
    """The model as a GGUF file in F32."""
    arch = case.architecture
    sizes: dict[str, Any] = {
        "block_count": case.layers,
        "context_length": 128,
        "embedding_length": case.hidden,
        "feed_forward_length": case.ffn,
        "attention.head_count": case.heads,
        "attention.head_count_kv": case.kv_heads,
        "attention.key_length": case.head_dim,
        "attention.value_length": case.head_dim,
        "attention.layer_norm_rms_epsilon": case.eps,
        "rope.freq_base": case.theta,
    }
    metadata = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in sizes.items()}, **case.metadata}
    tensors = gguf_tensors(case)
    return write_gguf(path, metadata, {name: (array, "F32") for name, array in tensors.items()})


def gguf_tensors(case: Case) -> dict[str, F32]:
    """The weights by the names and in the layout of GGUF."""
    tensors: dict[str, F32] = {}
    for name, array in hf_weights(case).items():
        renamed = _gguf_name(name)
        if case.architecture == "llama" and "attn_q" in renamed:
            array = interleave(array, case.heads)
        if case.architecture == "llama" and "attn_k" in renamed:
            array = interleave(array, case.kv_heads)
        tensors[renamed] = array
    if case.rope_freqs:
        tensors["rope_freqs.weight"] = llama3_factors(case.theta, case.head_dim)
    return tensors


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def interleave(weight: F32, heads: int) -> F32:
    """Rows of each head from halves (i, i + d/2) to pairs (2i, 2i + 1), as Llama files are converted to GGUF."""
    rows, cols = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols))


def llama3_factors(theta: float, head_dim: int) -> F32:
    """By how much Llama 3.1 lowers each pair's frequency, as written to `rope_freqs.weight`."""
    old = LLAMA3_SCALING["original_max_position_embeddings"]
    low, high, factor = (LLAMA3_SCALING[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(max((old / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
