"""Model files against transformers' own code, and the registry: what it reads, checks and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelError
from chairlift.kernels import reference
from chairlift.kernels.backend import KVDtype, KVLayout, LoadSpec
from chairlift.kernels.ops import F32, I32
from chairlift.models import registry
from chairlift.models.gguf import GGUFFile
from chairlift.models.spec import RawTensor, RopeSpec
from support.model_cases import CASES, TOKENS, write_case
from support.paths import FIXTURES
from support.step_arrays import Part, make_step
from support.tiny_gguf import Shape, model_metadata, model_tensors

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


# ---- arithmetic ----


class ExactCache(reference.Cache):
    """Keys and values kept in float32, so that only the model's arithmetic is compared."""

    def __init__(self, kv: KVLayout, num_heads: int, width: int) -> None:
        super().__init__(kv, num_heads, width)
        self._exact = self._data.astype(np.float32)

    def write(self, slots: I32, x: F32) -> None:
        self._exact[slots] = x

    def read(self, slots: npt.NDArray[np.integer]) -> reference.Kept:
        return reference.Kept(self._exact[slots])


def logits_of(path: Path, kv: KVDtype = "bf16") -> F32:
    """Logits of every position of TOKENS, computed in one step."""
    with GGUFFile.open(path) as file:
        spec = registry.read_spec(file)
        tensors = registry.model_tensors(spec, file.tensors)
        forward = registry.forward_for(spec.architecture)
        model = reference.ReferenceBackend().load(LoadSpec(spec, forward, tensors, KVLayout(3, 16, kv), 64))
        logits = model.run(make_step([Part(TOKENS, 0, [2, 0, 1], len(TOKENS))])).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A model file that is nearly right: a norm, bias, rope style, scaling or head order that only blurs the text."""
    expected = np.load(FIXTURES / "models" / f"{name}.npz")["logits"]
    path = write_case(tmp_path / "model.gguf", CASES[name])
    largest = np.abs(expected).max()
    rounded = {kv: np.abs(logits_of(path, kv) - expected).max() / largest for kv in ("bf16", "int8")}
    monkeypatch.setattr(reference, "Cache", ExactCache)
    monkeypatch.setattr(reference, "to_bf16", lambda x: x)
    assert np.abs(logits_of(path) - expected).max() < 1e-5 * largest
    assert 1e-5 < rounded["bf16"] < 0.05, "sharp attention makes much of a rounded key"
    assert rounded["bf16"] < rounded["int8"] < 0.3


class Spy:
    """An op list that computes nothing."""

    def __getattr__(self, op: str) -> Callable[..., str]:
        return lambda *args, **settings: op


class Asked(Mapping[str, str]):
    """Any name is there; notes each that was looked up."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> str:
        self.names.append(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_asks_for_the_weights_that_were_checked(architecture: str) -> None:
    """A tensor that is used but not checked (a KeyError at load), or checked but forgotten in forward."""
    spec = registry.read_spec(model_file(architecture))
    weights = Asked()
    registry.forward_for(architecture)(Spy(), spec, weights)
    assert sorted(weights.names) == sorted(registry.weight_names(spec))


# ---- registry ----


def model_file(architecture: str = "llama", metadata: Mapping[str, Any] | None = None, **shape: Any) -> Any:
    """A tiny model as read from a file; `metadata` overrides keys, None removing one."""
    dimensions = Shape(architecture, **shape)
    keys = {**model_metadata(dimensions), **(metadata or {})}
    return SimpleNamespace(
        metadata={key: value for key, value in keys.items() if value is not None},
        tensors={name: tensor(name, array) for name, (array, _) in model_tensors(dimensions).items()},
    )


def tensor(name: str, array: F32, type_name: str = "F32") -> RawTensor:
    return RawTensor(name, array.shape, type_name, np.ascontiguousarray(array).view(np.uint8).reshape(-1))


def test_a_spec_is_what_the_file_says() -> None:
    """A number taken from the wrong key, or a default where the file has a value."""
    spec = registry.read_spec(
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
    spec = registry.read_spec(file)
    layer = spec.layers[0]
    assert (spec.name, layer.num_kv_heads, layer.head_dim, layer.value_dim) == ("llama", 4, 16, 16)
    assert layer.rope == RopeSpec(16, 10000.0, "interleaved")


def test_a_tied_head_is_the_very_embedding() -> None:
    """A tied table packed twice, or an untied head that is passed over."""
    tied, untied = model_file(tied=True), model_file()
    names = registry.weight_names(registry.read_spec(tied))
    assert names == registry.weight_names(registry.read_spec(untied))
    weights = registry.model_tensors(registry.read_spec(tied), tied.tensors)
    assert weights["output.weight"] is weights["token_embd.weight"]
    weights = registry.model_tensors(registry.read_spec(untied), untied.tensors)
    assert weights["output.weight"] is untied.tensors["output.weight"]
    assert list(weights) == names


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
    assert (
        registry.read_spec(model_file(metadata={f"llama.{k}": v for k, v in keys.items()})).layers[0].rope.scale
        == scale
    )


def test_rope_factors_are_read() -> None:
    """Llama 3's frequency factors left out: right for 8k tokens, then nonsense."""
    assert registry.read_spec(model_file(rope_freqs=True)).layers[0].rope.factors == tuple(
        np.linspace(1, 8, 8).tolist()
    )


@pytest.mark.parametrize(("window", "context"), [(100, 100), (4096, 512), (0, 512)])
def test_a_sliding_window_bounds_the_context(window: int, context: int) -> None:
    """A window that is ignored: attention over positions that the model was trained not to see."""
    assert registry.read_spec(model_file(metadata={"llama.attention.sliding_window": window})).context_length == context


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
    ("a key from the future", {"llama.attention.novelty": [1] * 10000}, "llama.attention.novelty = .{60,70} is not"),
    ("another vocabulary", {"tokenizer.ggml.tokens": ["a"]}, "1 entries.*271 rows"),
]


@pytest.mark.parametrize(("metadata", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(metadata: dict[str, Any], says: str) -> None:
    """A model that loads and then answers wrongly, or fails with a KeyError."""
    with pytest.raises(ModelError, match=says) as caught:
        registry.read_spec(model_file(metadata=metadata))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["final_logit_softcapping", "expert_count", "attention.scale", "rope.scaling.finetuned"]
)
def test_neutral_values_pass(key: str) -> None:
    """A file refused for a key that says nothing is special."""
    assert registry.read_spec(model_file(metadata={f"llama.{key}": 0})) == registry.read_spec(model_file())


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("blk.0.attn_q.bias", (64,), "'blk.0.attn_q.bias' that a llama model does not use"),
        ("blk.1.ffn_gate_exps.weight", (4, 96, 64), "ffn_gate_exps"),
        ("rope_factors_long.weight", (8,), "rope_factors_long"),
        ("line\nbreak", (1,), r"line\\nbreak"),
        ("blk.2.attn_q.weight", (64, 64), "blk.2"),
        ("blk.1.attn_k.weight", (64, 32), r"attn_k.weight has shape \(64, 32\); its model needs \(32, 64\)"),
        ("output.weight", (270, 64), "output.weight has shape"),
        ("output_norm.weight", (65,), "output_norm.weight has shape"),
        ("token_embd.weight", (271,), "token_embd.weight has shape"),
        ("rope_freqs.weight", (7,), "rope_freqs.weight is F32 of shape"),
    ],
)
def test_tensors_are_checked_before_anything_is_loaded(name: str, shape: tuple[int, ...], says: str) -> None:
    """A foreign tensor that is silently left out, or a transposed one found in the middle of loading."""
    file = model_file()
    file.tensors[name] = tensor(name, np.ones(shape, np.float32))
    with pytest.raises(ModelError, match=says):
        registry.read_spec(file)


def test_missing_tensors_are_named() -> None:
    """A truncated download that is found at the first request."""
    file = model_file("qwen2")
    for layer, name in ((0, "attn_q.bias"), (1, "ffn_up.weight")):
        del file.tensors[f"blk.{layer}.{name}"]
    with pytest.raises(ModelError, match=r"no tensors 'blk.0.attn_q.bias', 'blk.1.ffn_up.weight', which a qwen2"):
        registry.read_spec(file)
    del file.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match=r"no tensor token_embd.weight"):
        registry.read_spec(file)


@pytest.mark.parametrize(("name", "type_name"), [("blk.0.ffn_up.weight", "Q2_K"), ("blk.0.attn_norm.weight", "Q8_0")])
def test_weight_types_are_checked(name: str, type_name: str) -> None:
    """A format that cannot be decoded found after a minute of loading the others."""
    file = model_file()
    file.tensors[name] = RawTensor(name, file.tensors[name].shape, type_name, np.zeros(1, np.uint8))
    with pytest.raises(ModelError, match=f"{name} has type {type_name}, which is not supported"):
        registry.read_spec(file)


@pytest.mark.parametrize("factors", [[1, 1, 0, 1, 1, 1, 1, 1], [1, np.inf] * 4, [np.nan] * 8, [-1.0] * 8])
def test_rope_factors_are_checked(factors: list[float]) -> None:
    """A division by a factor of 0: every logit NaN from position 1 on."""
    file = model_file()
    file.tensors["rope_freqs.weight"] = tensor("rope_freqs.weight", np.array(factors, np.float32))
    with pytest.raises(ModelError, match="not positive and finite"):
        registry.read_spec(file)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(key for key in model_metadata(Shape()) if "tokenizer" not in key)), value=VALUES)
def test_any_metadata_gives_a_spec_or_a_model_error(key: str, value: Any) -> None:
    """A hostile value that escapes as a TypeError, a MemoryError or an endless loop."""
    try:
        spec = registry.read_spec(model_file(metadata={key: value}))
    except ModelError:
        return
    assert len(registry.model_tensors(spec, model_file().tensors)) == len(registry.weight_names(spec))
