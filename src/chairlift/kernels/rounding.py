"""How the inputs of matrix products are rounded. Every backend takes the rule from here.

Weights of bf16 are multiplied by bf16 and the products summed in float32, as processors with such a unit do; weights of
float16 and float32 by float32.

A product of quantised weights rounds its input, 32 lanes at a time, to levels of 8 or 16 bits. Levels of 16 bits are
multiplied as two bytes: as good as float32, for twice the multiplications. Half of what 8 bits lose is lost in products
that are few: those that make queries, keys and values, and the head. They keep 16 bits (measured in docs/log.md).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from chairlift.models.spec import RawTensor

ActivationBits = Literal[8, 16]
DType = Literal["f32", "bf16", "int8", "int16"]
"""What the lanes of an activation are: floats, floats rounded to bf16, or levels with a scale per 32 lanes."""

_ROBUST = ("attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


def input_bits(tensor_name: str, activation_bits: ActivationBits) -> ActivationBits:
    """Bits of the input of the weight of this GGUF name, where `activation_bits` are asked for.

    16 for names that are not known.
    """
    return activation_bits if tensor_name.endswith(_ROBUST) else 16


def input_dtype(weight: RawTensor, activation_bits: ActivationBits) -> DType:
    """What the input of this weight is rounded to; a table that is only looked up has none."""
    if weight.type_name in ("F32", "F16"):
        return "f32"
    if weight.type_name == "BF16":
        return "bf16"
    return "int8" if input_bits(weight.name, activation_bits) == 8 else "int16"


def score_scale(scale: float) -> float:
    """What attention multiplies its scores by, exact in float32: 1 / (1 / scale), each rounded to float32.

    Models name a scale as the inverse of a root (head_dim ** -0.5): the root is what is rounded.
    """
    return float(np.float32(1) / np.float32(1 / scale))
