"""The arithmetic, against figures worked out by hand or published with a model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chairlift import cost
from chairlift.models.spec import LayerSpec, ModelSpec, RopeSpec


def spec(layers: int, kv_heads: int, head_dim: int, value_dim: int | None = None) -> ModelSpec:
    layer = LayerSpec(32, kv_heads, head_dim, value_dim or head_dim, RopeSpec(head_dim))
    return ModelSpec(
        architecture="llama", name="test", hidden_size=4096, ffn_size=14336, vocab_size=128256, context_length=8192,
        rms_eps=1e-5, layers=(layer,) * layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "want"),
    [
        (36, 8, 128, 147_456),
        (32, 8, 128, 131_072),  # Llama 3 8B; counting query heads would give 524,288
        (64, 8, 128, 262_144),  # Qwen3 32B, whose head_dim is not hidden / heads
        (30, 3, 64, 23_040),  # SmolLM2 135M
    ],
)
def test_kv_bytes_of_known_models(layers: int, heads: int, dim: int, want: int) -> None:
    """Grouped heads ignored, hidden size taken for heads x head_dim, or the value half forgotten."""
    assert cost.kv_bytes_per_token(spec(layers, heads, dim), "bf16") == want


def test_int8_kv_counts_its_scales() -> None:
    """A pool that allocates more than the plan says: one float32 per token and head, for keys and for values."""
    assert cost.kv_bytes_per_token(spec(30, 3, 64), "int8") == 30 * 3 * (64 + 64 + 4 + 4)


def test_keys_and_values_of_different_width() -> None:
    """value_dim taken for head_dim."""
    assert cost.kv_bytes_per_token(spec(2, 4, 192, value_dim=128), "bf16") == 2 * 4 * (192 + 128) * 2


def test_layers_are_summed_one_by_one() -> None:
    """The first layer taken for all of them."""
    wide, narrow = (spec(1, heads, 64).layers[0] for heads in (8, 1))
    mixed = replace(spec(3, 8, 64), layers=(wide, narrow, narrow))
    assert cost.kv_bytes_per_token(mixed, "bf16") == (8 + 1 + 1) * 128 * 2
    assert cost.kv_bytes_per_token(mixed, "int8") == (8 + 1 + 1) * (128 + 8)
    assert cost.activation_bytes(mixed, 7) == cost.activation_bytes(spec(1, 8, 64), 7)
    assert cost.activation_bytes(replace(mixed, layers=(narrow, wide)), 7) == cost.activation_bytes(mixed, 7)


def test_blocks_round_the_safe_way() -> None:
    """A pool rounded up beyond its bytes, or a table rounded down below its tokens."""
    assert cost.blocks_in(16 * 100 - 1, 100, 16) == 0
    assert cost.blocks_in(16 * 100, 100, 16) == 1
    assert cost.blocks_in(-5, 100, 16) == 0
    assert [cost.blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_stream_reads_all_weights_for_each_token() -> None:
    """A ceiling that is the reciprocal of what it should be."""
    assert cost.one_stream_ceiling(30e9, 100_000_000) == 300.0


def test_concurrency_is_pool_over_context() -> None:
    """The two meanings of capacity mixed up."""
    assert cost.concurrency(32768, 8192) == 4.0


def test_activations_grow_with_rows_but_logits_do_not() -> None:
    """A buffer of rows x vocabulary, or none at all, in the estimate."""
    small, large = (cost.activation_bytes(spec(1, 8, 128), rows) for rows in (1, 513))
    assert (large - small) % 512 == 0
    assert small > 4 * cost.LOGIT_ROWS * 128256
    assert large - small < 512 * 128256 * 4


@pytest.mark.parametrize(
    ("num_bytes", "want"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (98_362_432, "93.8 MiB"), (147_456, "144 KiB"),
     (2**40, "1.00 TiB"),
     (1024**2 - 1, "1024 KiB")],
)  # fmt: skip
def test_human_bytes(num_bytes: int, want: str) -> None:
    """Decimal units printed under binary names, or digits lost."""
    assert cost.human_bytes(num_bytes) == want


def test_packed_weights_have_a_ceiling() -> None:
    """A fit check against the file's size alone, although packing may take more."""
    assert cost.packed_weight_bytes(100) == 115
    assert math.isclose(cost.packed_weight_bytes(10**12), 1.15e12)
