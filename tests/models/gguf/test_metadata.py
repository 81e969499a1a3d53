"""GGUF metadata: what is read, checked and refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelError
from chairlift.models import registry
from chairlift.models.gguf.metadata import read_spec
from chairlift.models.spec import ModelSpec, RopeSpec
from support.memory_checkpoint import raw_tensor, raw_tensors
from support.tiny_gguf import Shape, model_metadata


def model_file(architecture: str = "llama", metadata: Mapping[str, Any] | None = None, **shape: Any) -> Any:
    """A tiny model as read from a file; `metadata` overrides keys, None removing one."""
    dimensions = Shape(architecture, **shape)
    keys = {**model_metadata(dimensions), **(metadata or {})}
    return SimpleNamespace(
        metadata={key: value for key, value in keys.items() if value is not None},
        tensors=raw_tensors(dimensions),
    )


def spec_of(file: Any) -> ModelSpec:
    return read_spec(file.metadata, file.tensors)


def test_a_spec_is_what_the_file_says() -> None:
    """A number taken from the wrong key, or a default where the file has a value."""
    spec = spec_of(
        model_file(
            "qwen3", hidden=96, heads=6, kv_heads=3, head_dim=32, ffn=128, layers=3, rope_theta=1e6, rms_eps=1e-6
        )
    )
    assert (spec.architecture, spec.name, spec.num_layers, spec.hidden_size, spec.ffn_size) == (
        "qwen3",
        "tiny-qwen3",
        3,
        96,
        128,
    )
    layer = spec.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.group_size, layer.head_dim, layer.value_dim) == (6, 3, 2, 32, 32)
    assert (spec.vocab_size, spec.context_length) == (271, 512)
    assert spec.rms_eps == pytest.approx(1e-6)
    assert layer.rope == RopeSpec(32, 1e6, "halves")


def test_defaults_are_those_of_the_format() -> None:
    """A file without optional keys refused, or given a wrong head count, head size, theta or name."""
    absent = ["attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size"]
    file = model_file("llama", {**{f"llama.{key}": None for key in absent}, "general.name": None}, kv_heads=4)
    spec = spec_of(file)
    layer = spec.layers[0]
    assert (spec.name, layer.num_kv_heads, layer.head_dim, layer.value_dim) == ("llama", 4, 16, 16)
    assert layer.rope == RopeSpec(16, 10000.0, "interleaved")


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 0.25),
        ({"rope.scaling.factor": 2.0}, 0.5),
        ({"rope.scale_linear": 8.0}, 0.125),
        ({"rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_linear_rope_scaling(keys: dict[str, Any], scale: float) -> None:
    """A factor that multiplies instead of divides, or is taken although scaling is off."""
    assert spec_of(model_file(metadata={f"llama.{k}": v for k, v in keys.items()})).layers[0].rope.scale == scale


def test_rope_factors_are_read() -> None:
    """Llama 3's frequency factors left out: right for 8k tokens, then nonsense."""
    assert spec_of(model_file(rope_freqs=True)).layers[0].rope.factors == tuple(np.linspace(1, 8, 8).tolist())


@pytest.mark.parametrize(
    ("window", "context", "note"),
    [(100, 100, "context is 100 of the 512 tokens that the model was trained for: its attention has a sliding window "
      "of 100, and a longer context is not supported"), (4096, 512, ""), (512, 512, ""), (0, 512, "")],
)  # fmt: skip
def test_a_sliding_window_bounds_the_context(window: int, context: int, note: str) -> None:
    """A window that is ignored: attention over positions that the model was trained not to see; or a reason lost."""
    spec = spec_of(model_file(metadata={"llama.attention.sliding_window": window}))
    assert (spec.context_length, spec.context_note) == (context, note)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no architecture", {"general.architecture": None}, "general.architecture"),
    ("another architecture", {"general.architecture": "gemma2"}, "'gemma2' is not supported.*llama, qwen2, qwen3"),
    ("no layers", {"llama.block_count": 0}, "llama.block_count is 0"),
    ("too many layers", {"llama.block_count": 10**9}, "llama.block_count"),
    ("a missing number", {"llama.embedding_length": None}, "no llama.embedding_length"),
    (
        "a missing epsilon",
        {"llama.attention.layer_norm_rms_epsilon": None},
        "no llama.attention.layer_norm_rms_epsilon",
    ),
    ("a text for a number", {"llama.feed_forward_length": "96"}, "feed_forward_length is '96'"),
    ("a truth for a number", {"llama.block_count": True}, "block_count is True"),
    ("a fraction for a count", {"llama.block_count": 2.0}, "block_count is 2.0"),
    ("a list by layer", {"llama.attention.head_count": [4, 2]}, "head_count has one value a layer"),
    ("a negative context", {"llama.context_length": -1}, "context_length is -1"),
    ("heads that do not divide", {"llama.attention.head_count_kv": 3}, "head_count 4 is not a multiple"),
    ("no head size", {"llama.attention.head_count": 6}, "no llama.attention.key_length"),
    ("an epsilon of nothing", {"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0"),
    ("an epsilon that is no number", {"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ("a theta without end", {"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
    ("an odd rotation", {"llama.rope.dimension_count": 7}, "dimension_count must be even"),
    ("a rotation beyond the head", {"llama.rope.dimension_count": 18}, "dimension_count is 18"),
    ("yarn", {"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported.*linear"),
    ("longrope", {"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    (
        "a scaling of nothing",
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -2.0},
        "factor is -2.0",
    ),
    ("experts", {"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
    ("an attention scale", {"llama.attention.scale": 0.1}, "llama.attention.scale = 0.1"),
    ("a softcap", {"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
    ("a key from the future", {"llama.attention.novelty": [1] * 10000}, "llama.attention.novelty = .{60,80} is not"),
    ("another vocabulary", {"tokenizer.ggml.tokens": ["a"]}, "1 entries.*271 rows"),
]


@pytest.mark.parametrize(("metadata", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(metadata: dict[str, Any], says: str) -> None:
    """A model that loads and then answers wrongly, or fails with a KeyError."""
    with pytest.raises(ModelError, match=says) as caught:
        spec_of(model_file(metadata=metadata))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["final_logit_softcapping", "expert_count", "attention.scale", "rope.scaling.finetuned"]
)
def test_neutral_values_pass(key: str) -> None:
    """A file refused for a key that says nothing is special."""
    assert spec_of(model_file(metadata={f"llama.{key}": 0})) == spec_of(model_file())


@pytest.mark.parametrize("factors", [[1, 1, 0, 1, 1, 1, 1, 1], [1, np.inf] * 4, [np.nan] * 8, [-1.0] * 8])
def test_rope_factors_are_checked(factors: list[float]) -> None:
    """A division by a factor of 0: every logit NaN from position 1 on."""
    file = model_file()
    file.tensors["rope_freqs.weight"] = raw_tensor("rope_freqs.weight", np.array(factors, np.float32))
    with pytest.raises(ModelError, match="not positive and finite"):
        spec_of(file)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(key for key in model_metadata(Shape()) if "tokenizer" not in key)), value=VALUES)
def test_any_metadata_gives_a_spec_or_a_model_error(key: str, value: Any) -> None:
    """A hostile value that escapes as a TypeError, a MemoryError or an endless loop."""
    try:
        spec = spec_of(model_file(metadata={key: value}))
    except ModelError:
        return
    assert len(registry.model_tensors(spec, model_file().tensors)) == len(registry.weight_names(spec))


def test_what_only_metadata_can_tell_of_tensors() -> None:
    """No embedding table, and an error that speaks of a layer; rotary factors of another width."""
    file = model_file()
    del file.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match=r"no tensor token_embd.weight"):
        spec_of(file)
    file = model_file()
    file.tensors["token_embd.weight"] = raw_tensor("token_embd.weight", np.ones(271, np.float32))
    with pytest.raises(ModelError, match=r"token_embd.weight has shape \(271,\); it must have 1 to"):
        spec_of(file)
    file = model_file()
    file.tensors["rope_freqs.weight"] = raw_tensor("rope_freqs.weight", np.ones(7, np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is F32 of shape"):
        spec_of(file)


def test_the_registry_checks_what_the_file_holds() -> None:
    """A reader that forgets to have its tensors checked."""
    file = model_file()
    file.tensors["blk.0.attn_q.bias"] = raw_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))
    with pytest.raises(ModelError, match=r"'blk.0.attn_q.bias' that a llama model does not use"):
        spec_of(file)
