"""What models ask of attention beside a scale: against a plain softmax in float64, and the laws bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chairlift.errors import ModelError
from chairlift.kernels.backend import Backend, KVDtype, KVLayout, LoadSpec, Model
from chairlift.kernels.native import NativeBackend, available_isas
from chairlift.kernels.ops import F32
from chairlift.kernels.reference import ReferenceBackend
from chairlift.kernels.rounding import score_scale
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec
from support.step_arrays import Part
from support.tiny_native import in_chunks, logits_of, tokens_of, whole

VOCAB = 256
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
WIDTHS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
SCALE = 0.3
KV_DTYPES: list[KVDtype] = ["bf16", "int8"]
NUM_BLOCKS = 100
SINKS = np.linspace(-2, 3, HEADS, dtype=np.float32)


def raw(name: str, array: F32) -> RawTensor:
    return RawTensor(name, array.shape, "F32", np.ascontiguousarray(array).view(np.uint8).reshape(-1))


def tables() -> dict[str, F32]:
    """A row of queries, keys and values for each token."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((VOCAB, width)).astype(np.float32) for name, width in WIDTHS.items()}


def load(backend: Backend, kv: KVDtype = "bf16", rows: int = 64, **asked: Any) -> Model:
    """One attention as a model: the first lanes of its output are the logits. `asked` are attend's own arguments."""
    unit = np.zeros((VOCAB, WIDTHS["q"]), np.float32)
    np.fill_diagonal(unit, 1)
    tensors = {name: raw(name, table) for name, table in tables().items()}
    tensors |= {"head": raw("head", unit), "sinks": raw("sinks", SINKS)}

    def forward(ops: Any, spec: ModelSpec, weights: Any) -> Any:
        q, k, v = (ops.embed(weights[name]) for name in "qkv")
        sinks = {"sinks": weights["sinks" if asked["sinks"] is True else "q"]} if "sinks" in asked else {}
        given = {**asked, **sinks}
        return ops.logits(ops.attend(q, k, v, 0, scale=SCALE, **given), weights["head"])

    layer = LayerSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, RopeSpec(HEAD_DIM))
    spec = ModelSpec("attend", "attend", WIDTHS["q"], 32, VOCAB, 4096, 1e-5, (layer,))
    return backend.load(LoadSpec(spec, forward, tensors, KVLayout(NUM_BLOCKS, dtype=kv), rows))


def exact(tokens: Sequence[int], window: int | None = None, softcap: float | None = None, sinks: bool = False) -> Any:
    """The same in float64 on unrounded keys and values, (rows, query lanes)."""
    q, k, v = (table[list(tokens)].astype(np.float64) for table in tables().values())
    q, k, v = (x.reshape(len(tokens), -1, HEAD_DIM) for x in (q, k, v))
    out: npt.NDArray[np.float64] = np.empty_like(q)
    at = np.arange(len(tokens))
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or len(tokens)))
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, group].T * SCALE
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(axis=1) + (np.exp(float(SINKS[head])) if sinks else 0)
        out[:, head] = weights @ v[:, group] / total[:, None]
    return out.reshape(len(tokens), -1)


ASKED: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 20, "softcap": 0.8, "sinks": True},
}
WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 700, 5000]
LAWFUL = [*({"window": window} for window in WINDOWS), ASKED["softcap"], ASKED["sinks"]]
LONG = 1300


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("name", ASKED)
def test_attention_is_a_plain_softmax(name: str, kv: KVDtype) -> None:
    """A parameter that is applied in other units, on the wrong side of the scale, or not at all."""
    tokens, asked = tokens_of(1, 60), ASKED[name]
    expected = exact(tokens, **asked)
    got = whole(load(ReferenceBackend(), kv, **asked), tokens, range(4))[:, : WIDTHS["q"]]
    assert np.abs(got - expected).max() < (0.03 if kv == "bf16" else 0.1)
    for isa in available_isas():
        native = whole(load(NativeBackend(isa, threads=2), kv, **asked), tokens, range(4))[:, : WIDTHS["q"]]
        assert np.abs(native - got).max() < (0.01 if kv == "bf16" else 0.03)
        assert np.median(np.abs(native - got)) < 1e-6
    assert np.abs(exact(tokens) - expected).max() > 0.3


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_window_of_everything_is_no_window(kv: KVDtype) -> None:
    """A window that is counted from another end, or that changes a bit where it hides nothing."""
    tokens = tokens_of(2, 60)
    backends: list[Backend] = [ReferenceBackend(), *(NativeBackend(isa, threads=2) for isa in available_isas())]
    for backend in backends:
        plain = whole(load(backend, kv), tokens, range(4))
        assert (whole(load(backend, kv, window=60), tokens, range(4)) == plain).all()
        assert (whole(load(backend, kv, window=59), tokens, range(4)) == plain).all(axis=1).sum() == 59


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    "asked", [*({"window": window} for window in WINDOWS), ASKED["softcap"], ASKED["sinks"]], ids=str
)
@pytest.mark.parametrize("isa", available_isas())
def test_the_laws_hold(isa: str, asked: dict[str, Any], kv: KVDtype) -> None:
    """A row whose tiles or splits depend on its neighbours' windows, on the chunk, or on which threads share them."""
    tokens, table = tokens_of(3, LONG), list(range(NUM_BLOCKS))[::-1][: -(-LONG // 16)]
    model = load(NativeBackend(isa, threads=3), kv, rows=LONG, **asked)
    at_once = whole(model, tokens, table)
    assert np.isfinite(at_once).all()
    single = load(NativeBackend(isa), kv, rows=LONG, **asked)
    assert (in_chunks(single, tokens, table, [500, 1, 60, 3, 1, 130, 5, 600]) == at_once).all()
    late = [1299, 1298, 1290, 1100, 1024, 1023, 700, 577, 576, 575, 512, 511, 64, 63, 0]
    for row in late:  # alone: the caches hold the whole sequence
        assert (logits_of(model, [Part(tokens[row : row + 1], row, table)]) == at_once[row]).all()


def test_a_long_window_is_the_reference() -> None:
    """Tiles or splits before the window that are counted, or those inside it that are left out."""
    tokens, table = tokens_of(4, LONG), list(range(-(-LONG // 16)))
    for window in (100, 600):
        asked: dict[str, Any] = {"rows": LONG, "window": window}
        model, oracle = load(NativeBackend(threads=2), **asked), load(ReferenceBackend(), **asked)
        expected = whole(oracle, tokens, table)[:, : WIDTHS["q"]]
        assert np.abs(exact(tokens, window) - expected).max() < 0.03
        got = whole(model, tokens, table)[:, : WIDTHS["q"]]
        assert np.abs(got - expected).max() < 0.01
        assert np.median(np.abs(got - expected)) < 1e-6


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window": 0}, "a window holds at least the row's own position"),
    ({"softcap": 0.0}, "a softcap is above 0"),
    ({"sinks": "q"}, "sinks are not one for each query head"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_cannot_be_computed_is_refused(asked: dict[str, Any], message: str) -> None:
    """A softmax of no scores, or sinks read past their end."""
    with pytest.raises(ModelError, match=message):
        load(NativeBackend(), **asked)


def test_a_scale_is_the_inverse_of_a_root() -> None:
    """A model's scale rounded otherwise than the square root of its head size: the last bit of every score."""
    for head_dim in range(8, 1025, 8):
        assert score_scale(head_dim**-0.5) == np.float32(1) / np.sqrt(np.float32(head_dim))
