"""Models that apply one op again and again, which `chairlift bench kernels` times.

A chain is written in the op list, as model files are. The compiled core runs it as it runs a model: on its thread pool,
with the fusions of the recorder. The reference runs it too, which gives the error. The time of a link is that of the
chain, less that of the same model without links, divided by the number of links.

    embed x (and other inputs) -> link 0 -> link 1 -> ... -> logits of a head of 256 outputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from chairlift import cost
from chairlift.kernels.backend import BLOCK_SIZE, Backend, KVDtype, KVLayout, LoadSpec, Model
from chairlift.kernels.ops import SAMPLE_DTYPE, Ops, StepArrays
from chairlift.kernels.rounding import ActivationBits
from chairlift.microbench.random_weights import draw
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec

Unit = Literal["dot", "fma", "bf16"]
"""The arithmetic unit whose ceiling applies: 8-bit products, f32 multiply-adds or products of bf16."""
Weights = Mapping[str, Any]
FLOAT_LAYOUTS = ("f16", "bf16", "f32")
VOCAB = 256
WORKING_SET_BYTES = 96 << 20
"""Weights that a chain reads in turn: more than most caches hold, like those of a model."""
ATTENTION_LAYERS = 4
ROW_LINKS = 16


@dataclass(frozen=True, slots=True)
class LinkContext:
    """The inputs of a link. `x` is the activation so far, `others` are the other inputs of the chain."""

    ops: Ops[Any, Any]
    weights: Weights
    spec: ModelSpec
    index: int
    x: Any
    others: Sequence[Any]


Link = Callable[[LinkContext], Any]
"""Returns the next x."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A model of `spec.num_layers` links. `inputs` names the tables that its inputs come from, x first."""

    op: str
    what: str
    spec: ModelSpec
    link: Link
    tensors: Mapping[str, RawTensor]
    inputs: tuple[str, ...] = ("x",)
    unit: Unit | None = None
    kv_dtype: KVDtype = "bf16"
    activation_bits: ActivationBits = 8

    def shortened(self, links: int) -> Chain:
        """The same chain with at most so many links. Without links, it is what every chain costs besides them."""
        short = replace(self, spec=replace(self.spec, layers=self.spec.layers[: max(1, links)]))
        return short if links else replace(short, link=lambda at: at.x)

    def load(self, backend: Backend, *, rows: int, blocks: int) -> Model:
        """Loads the chain for steps of at most `rows` rows, with a KV pool of `blocks` blocks."""
        kv = KVLayout(blocks, BLOCK_SIZE, self.kv_dtype)
        forward = partial(_forward, self.link, self.inputs)
        return backend.load(LoadSpec(self.spec, forward, self.tensors, kv, rows))


def _forward(link: Link, inputs: Sequence[str], ops: Ops[Any, Any], spec: ModelSpec, weights: Weights) -> Any:
    x, *others = (ops.embed(weights[name]) for name in inputs)
    for index in range(spec.num_layers):
        x = link(LinkContext(ops, weights, spec, index, x, others))
    return ops.logits(x, weights["head"])


def matmul(weight_type: str, layout: str, hidden: int, ffn: int, bits: ActivationBits = 8) -> Chain:
    """hidden -> ffn -> hidden: two products and the rounding of their inputs. Every link has matrices of its own.

    `bits` are those of the inputs; layouts of floats ignore them.
    """
    rng = np.random.default_rng(0)
    up = replace(random_tensor(rng, weight_type, ffn, hidden), name="ffn_up.weight")
    down = replace(random_tensor(rng, weight_type, hidden, ffn), name="ffn_down.weight")
    links = math.ceil(WORKING_SET_BYTES / (up.data.size + down.data.size))
    tensors = _tables(rng, hidden, "x")
    for index in range(links):  # the core packs each tensor object, even if its bytes are the same
        tensors |= {f"up.{index}": replace(up), f"down.{index}": replace(down)}

    def link(at: LinkContext) -> Any:
        wide = at.ops.linear(at.x, at.weights[f"up.{at.index}"])
        return at.ops.linear(wide, at.weights[f"down.{at.index}"])

    what = f"{hidden} x {ffn} x {hidden}"
    if layout in FLOAT_LAYOUTS:
        unit: Unit = "bf16" if layout == "bf16" else "fma"
        return Chain(f"matmul {layout}", what, _spec(hidden, links), link, tensors, unit=unit)
    name = f"matmul {layout} a{bits}"
    return Chain(name, what, _spec(hidden, links), link, tensors, unit="dot", activation_bits=bits)


def attention(heads: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype) -> Chain:
    """One attention layer: keys and values are written, then attended to."""
    rng = np.random.default_rng(0)
    tensors = _tables(rng, kv_heads * head_dim, "keys", "values") | _tables(rng, heads * head_dim, "x")
    layer = LayerSpec(heads, kv_heads, head_dim, head_dim, RopeSpec(head_dim))
    spec = replace(_spec(heads * head_dim, 1), layers=(layer,) * ATTENTION_LAYERS)

    def link(at: LinkContext) -> Any:
        keys, values = at.others
        return at.ops.attend(at.x, keys, values, at.index, scale=head_dim**-0.5)

    what = f"{heads} on {kv_heads} heads of {head_dim}"
    inputs = ("x", "keys", "values")
    unit: Unit = "bf16" if kv_dtype == "bf16" else "dot"  # int8: half the products are of 16 bits, at half the rate
    return Chain(f"attention {kv_dtype}", what, spec, link, tensors, inputs, unit=unit, kv_dtype=kv_dtype)


def row_ops(hidden: int, ffn: int) -> list[Chain]:
    """The ops between products and attention: norms, activation, rotation, sum."""
    rng = np.random.default_rng(0)
    gain = {"gain": RawTensor("gain", (hidden,), "F32", np.ones(hidden, "<f4").view(np.uint8))}
    thin = {"thin": random_tensor(rng, "Q8_0", 16, hidden)}
    tables, wide = _tables(rng, hidden, "x", "y"), _tables(rng, ffn, "x", "gate")

    def norm(at: LinkContext) -> Any:
        return at.ops.rms_norm(at.x, at.weights["gain"], at.spec.rms_eps)

    def rounded_norm(at: LinkContext) -> Any:
        at.ops.linear(norm(at), at.weights["thin"])  # so that the norm is rounded for a product
        return at.x

    def swiglu(at: LinkContext) -> Any:
        (gate,) = at.others
        return at.ops.gated(gate, at.x, "silu")

    def rope(at: LinkContext) -> Any:
        layer = at.spec.layers[at.index]
        return at.ops.rope(at.x, layer.rope, layer.head_dim)

    spec = _spec(hidden, ROW_LINKS)
    return [
        Chain("norm", f"{hidden}", spec, norm, tables | gain),
        Chain("norm, rounded", f"{hidden}, and 16 outputs", spec, rounded_norm, tables | gain | thin),
        Chain("rope", f"{hidden}", spec, rope, tables),
        Chain("add", f"{hidden}", spec, lambda at: at.ops.add(at.x, *at.others), tables, ("x", "y")),
        Chain("swiglu", f"{ffn}", _spec(ffn, ROW_LINKS), swiglu, wide, ("x", "gate")),
    ]


def random_tensor(rng: np.random.Generator, weight_type: str, rows: int, cols: int) -> RawTensor:
    """Weights whose rows have length near 1, so that a product is about as large as its input."""
    if weight_type in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, cols), np.float32) * np.float32(cols**-0.5)
        data = values.astype("<f2") if weight_type == "F16" else values
        raw = data.view(np.uint8).reshape(-1)
        if weight_type == "BF16":
            raw = np.ascontiguousarray(raw.reshape(-1, 4)[:, 2:]).reshape(-1)  # the upper half of an f32
    else:
        raw = np.concatenate(list(draw(rng, weight_type, (rows, cols))))
    return RawTensor(weight_type, (rows, cols), weight_type, raw)


def _tables(rng: np.random.Generator, width: int, *names: str) -> dict[str, RawTensor]:
    """Tables of inputs near 1, one row a token, and an output head of this width."""
    values = {name: rng.standard_normal((VOCAB, width), np.float32) for name in names}
    tables = {name: RawTensor(name, (VOCAB, width), "F32", v.view(np.uint8).reshape(-1)) for name, v in values.items()}
    return tables | {"head": random_tensor(rng, "F32", VOCAB, width)}


def _spec(width: int, links: int) -> ModelSpec:
    return ModelSpec(
        architecture="chain",
        name="chain",
        hidden_size=width,
        ffn_size=width,
        vocab_size=VOCAB,
        context_length=1 << 20,
        rms_eps=1e-5,
        layers=(LayerSpec(1, 1, 64, 64, RopeSpec(64)),) * links,
    )


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The rows of one sequence in a step: `rows` tokens from position `start` on."""

    start: int
    rows: int

    @property
    def blocks(self) -> int:
        """KV blocks of the sequence."""
        return cost.blocks_for(self.start + self.rows, BLOCK_SIZE)

    @property
    def visible(self) -> int:
        """Number of pairs of a row and a position that it attends to."""
        return self.rows * self.start + self.rows * (self.rows + 1) // 2


def step(parts: Sequence[SequencePart], *, want_logits: bool = False) -> StepArrays:
    """A step of these sequences, each with blocks of its own; logits for the last row only."""
    tables = np.split(np.arange(sum(part.blocks for part in parts)), np.cumsum([p.blocks for p in parts])[:-1])
    positions = [np.arange(part.start, part.start + part.rows) for part in parts]
    slots = [
        table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(tables, positions, strict=True)
    ]
    rows = sum(part.rows for part in parts)
    sample = np.zeros(1, SAMPLE_DTYPE)
    sample["top_p"] = sample["repetition_penalty"] = 1
    sample["num_top"] = sample["target"] = -1
    nothing, starts = np.zeros(0, np.int32), np.zeros(2, np.int32)
    return StepArrays(
        tokens=(np.arange(rows) * 7 % VOCAB).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        seq_starts=np.cumsum([0, *(part.rows for part in parts)]).astype(np.int32),
        table_starts=np.cumsum([0, *(part.blocks for part in parts)]).astype(np.int32),
        block_tables=np.concatenate(tables).astype(np.int32),
        logit_rows=np.array([rows - 1], np.int32),
        sample=sample,
        bias_starts=starts,
        bias_ids=nothing,
        bias_values=np.zeros(0, np.float32),
        seen_starts=starts,
        seen_ids=nothing,
        seen_counts=nothing,
        want_logits=want_logits,
    )


def fill(model: Model, blocks: int, rows: int) -> None:
    """Writes keys and values into every block, as sequences of one block each, which is cheap."""
    for first in range(0, blocks, rows // BLOCK_SIZE):
        count = min(rows // BLOCK_SIZE, blocks - first)
        whole = step([SequencePart(0, BLOCK_SIZE)] * count)
        model.run(
            replace(
                whole,
                slots=whole.slots + np.int32(first * BLOCK_SIZE),
                block_tables=whole.block_tables + np.int32(first),
            )
        )
