"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama layer with a bias on Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping

from chairlift.kernels.ops import Ops, W, X
from chairlift.models import llama
from chairlift.models.spec import LayerSpec, ModelSpec


def layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by their names after `blk.N.`, and their row-major shapes."""
    return llama.layer_shapes(spec, layer) | {
        "attn_q.bias": (layer.num_heads * layer.head_dim,),
        "attn_k.bias": (layer.num_kv_heads * layer.head_dim,),
        "attn_v.bias": (layer.num_kv_heads * layer.value_dim,),
    }


def forward(ops: Ops[X, W], spec: ModelSpec, weights: Mapping[str, W]) -> X:
    """Token ids to logits of the rows that need them."""
    x = ops.embed(weights["token_embd.weight"])
    for index, layer in enumerate(spec.layers):
        name = f"blk.{index}."

        h = ops.rms_norm(x, weights[name + "attn_norm.weight"], spec.rms_eps)
        q = ops.linear(h, weights[name + "attn_q.weight"], weights[name + "attn_q.bias"])
        k = ops.linear(h, weights[name + "attn_k.weight"], weights[name + "attn_k.bias"])
        v = ops.linear(h, weights[name + "attn_v.weight"], weights[name + "attn_v.bias"])
        q, k = ops.rope(q, layer.rope, layer.head_dim), ops.rope(k, layer.rope, layer.head_dim)
        h = ops.attend(q, k, v, index, scale=layer.head_dim**-0.5, window=layer.window)
        x = ops.add(x, ops.linear(h, weights[name + "attn_output.weight"]))

        h = ops.rms_norm(x, weights[name + "ffn_norm.weight"], spec.rms_eps)
        gate = ops.linear(h, weights[name + "ffn_gate.weight"])
        up = ops.linear(h, weights[name + "ffn_up.weight"])
        x = ops.add(x, ops.linear(ops.gated(gate, up, "silu"), weights[name + "ffn_down.weight"]))

    x = ops.rms_norm(x, weights["output_norm.weight"], spec.rms_eps)
    return ops.logits(x, weights["output.weight"])
