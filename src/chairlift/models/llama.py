"""The Llama family: SmolLM2, Llama 2 and 3, Mistral. RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Architecture: Touvron et al. 2023 (Llama 2), grouped queries after Ainslie et al. 2023. Which lanes rotate together, and
Llama 3's frequency factors, stand in `LayerSpec.rope`.
"""

from __future__ import annotations

from collections.abc import Mapping

from chairlift.kernels.ops import Ops, W, X
from chairlift.models.spec import LayerSpec, ModelSpec


def layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by their names after `blk.N.`, and their row-major shapes."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (layer.num_heads * layer.head_dim, hidden),
        "attn_k.weight": (layer.num_kv_heads * layer.head_dim, hidden),
        "attn_v.weight": (layer.num_kv_heads * layer.value_dim, hidden),
        "attn_output.weight": (hidden, layer.num_heads * layer.value_dim),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }


def forward(ops: Ops[X, W], spec: ModelSpec, weights: Mapping[str, W]) -> X:
    """Token ids to logits of the rows that need them."""
    x = ops.embed(weights["token_embd.weight"])
    for index, layer in enumerate(spec.layers):
        name = f"blk.{index}."

        h = ops.rms_norm(x, weights[name + "attn_norm.weight"], spec.rms_eps)
        q = ops.linear(h, weights[name + "attn_q.weight"])
        k = ops.linear(h, weights[name + "attn_k.weight"])
        v = ops.linear(h, weights[name + "attn_v.weight"])
        q, k = ops.rope(q, layer.rope, layer.head_dim), ops.rope(k, layer.rope, layer.head_dim)
        h = ops.attend(q, k, v, index, scale=layer.head_dim**-0.5, window=layer.window)
        x = ops.add(x, ops.linear(h, weights[name + "attn_output.weight"]))

        h = ops.rms_norm(x, weights[name + "ffn_norm.weight"], spec.rms_eps)
        gate = ops.linear(h, weights[name + "ffn_gate.weight"])
        up = ops.linear(h, weights[name + "ffn_up.weight"])
        x = ops.add(x, ops.linear(ops.gated(gate, up, "silu"), weights[name + "ffn_down.weight"]))

    x = ops.rms_norm(x, weights["output_norm.weight"], spec.rms_eps)
    return ops.logits(x, weights["output.weight"])
