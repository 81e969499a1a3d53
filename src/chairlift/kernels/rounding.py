"""To how many bits the inputs of integer products are rounded: the one place that decides it, for every backend.

A product rounds its input, 32 lanes at a time, to levels of 8 or 16 bits. Levels of 16 bits are multiplied as two
bytes: as good as float32, for twice the multiplications. Half of what 8 bits lose is lost in products that are few:
those that make queries, keys and values, and the head. They keep 16 bits (measured in docs/log.md).
"""

from __future__ import annotations

from typing import Literal

ActivationBits = Literal[8, 16]

_ROBUST = ("attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


def input_bits(tensor_name: str, activation_bits: ActivationBits) -> ActivationBits:
    """Bits of the input of the weight of this GGUF name, where `activation_bits` are asked for.

    16 for names that are not known.
    """
    return activation_bits if tensor_name.endswith(_ROBUST) else 16
