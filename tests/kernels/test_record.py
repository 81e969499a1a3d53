"""Recording, fusion and the placing of activations: pure Python, on hand-made nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelError
from chairlift.kernels import rounding
from chairlift.kernels.emit import Placement
from chairlift.kernels.fuse import WeightKinds, fuse
from chairlift.kernels.record import (
    Add,
    Attend,
    Embed,
    Gated,
    Lanes,
    Linear,
    Logits,
    Node,
    Quantise,
    Recorder,
    RmsNorm,
    Rope,
    Value,
    rope_frequencies,
)
from chairlift.kernels.rounding import DType
from chairlift.models.llama import forward, layer_shapes
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec

SPEC = ModelSpec(
    architecture="llama",
    name="made by hand",
    hidden_size=64,
    ffn_size=96,
    vocab_size=50,
    context_length=512,
    rms_eps=1e-5,
    layers=(LayerSpec(4, 2, 16, 16, RopeSpec(16)),) * 2,
)
KINDS = WeightKinds(
    layout_of=lambda name: {"Q4_0": "w4", "Q8_0": "w8", "BF16": "bf16"}.get(name, "f32"),
    input_dtype=lambda weight: rounding.input_dtype(weight, 8),
)


def weight(shape: tuple[int, ...], type_name: str = "Q4_0", name: str = "ffn_up.weight") -> RawTensor:
    return RawTensor(name, shape, type_name, np.zeros(0, np.uint8))


def llama(types: dict[str, str]) -> list[Node]:
    """The fused nodes of a two-layer Llama whose matrices have Q4_0 weights, but those named."""
    shapes = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer_shapes(SPEC, SPEC.layers[0]).items()}
    shapes |= {"token_embd.weight": (50, 64), "output_norm.weight": (64,), "output.weight": (50, 64)}
    tensors = {}
    for name, shape in shapes.items():
        type_name = types.get(name.split(".")[-2], "Q4_0") if len(shape) == 2 else "F32"
        tensors[name] = weight(shape, type_name, name)
    recorder = Recorder(SPEC)
    forward(recorder, SPEC, tensors)
    return fuse(recorder.nodes, KINDS)


NAMES = {Embed: "embed", RmsNorm: "rms_norm", Linear: "linear", Rope: "rope", Attend: "attend", Gated: "gated"}
NAMES |= {Add: "add", Logits: "logits", Quantise: "quantise"}


def described(nodes: list[Node]) -> list[str]:
    """Each node as name, number of stacked weights, + for a residual, ' for outputs of 16 bits, " of 8, ^ of bf16."""
    marks = {"f32": "", "int16": "'", "int8": '"', "bf16": "^"}
    return [
        NAMES[type(n)]
        + (f"{len(n.weights)}{'+' * (n.residual is not None)}" if isinstance(n, Linear) else "")
        + "".join(marks[value.dtype] for value in n.outputs[:1])
        for n in nodes
    ]


def test_a_quantised_llama_layer_is_ten_ops() -> None:
    """A fusion lost: each is a pass over the activations and a barrier, thirty times a token."""
    layer = [
        "rms_norm'",
        "linear3",
        "rope",
        "rope",
        "attend",
        'quantise"',
        "linear1+",
        'rms_norm"',
        "linear2",
        'gated"',
    ]
    assert described(llama({})) == ["embed", *layer, "linear1+", *layer, "linear1+", "logits"]


def test_mixed_types_stack_by_layout() -> None:
    """Weights of different layouts put into one matrix, or a rounding made twice for the two products."""
    kinds = described(llama({"attn_v": "Q8_0", "ffn_up": "F32"}))
    attention = ["rms_norm'", "linear2", "linear1", "rope", "rope", "attend", 'quantise"', "linear1+"]
    assert kinds[1:9] == attention
    assert kinds[9:15] == ["rms_norm", 'quantise"', "linear1", "linear1", 'gated"', "linear1+"]


def test_float_weights_need_no_rounding() -> None:
    """Activations rounded to int8 for weights that do not ask for it."""
    types = dict.fromkeys([name.split(".")[0] for name in layer_shapes(SPEC, SPEC.layers[0])], "F16")
    assert all(value.dtype == "f32" for node in llama(types) for value in node.outputs)


def test_bf16_weights_take_bf16() -> None:
    """Rows rounded once a product instead of once, or rows of f32 that the kernel reads as pairs of bf16."""
    kinds = described(llama(dict.fromkeys([name.split(".")[0] for name in layer_shapes(SPEC, SPEC.layers[0])], "BF16")))
    layer = ["rms_norm^", "linear3", "rope", "rope", "attend", "quantise^", "linear1+"]
    assert kinds[1:12] == [*layer, "rms_norm^", "linear2", "gated^", "linear1+"]


def test_the_last_norm_is_left_to_the_logit_rows() -> None:
    """Every row of a prompt normed for the sake of one."""
    head = llama({})[-1]
    assert isinstance(head, Logits)
    assert head.norm is not None
    assert (head.head.shape, head.norm.weight.shape, head.norm.eps) == ((50, 64), (64,), SPEC.rms_eps)


def test_a_sum_that_others_read_too_is_kept() -> None:
    """A product folded into a sum although its own value is needed as well, or before the other term exists."""
    recorder = Recorder(SPEC)
    x = recorder.embed(weight((50, 64)))
    early = recorder.linear(x, weight((64, 64)))
    late = recorder.linear(x, weight((64, 64), "F32"))
    total = recorder.add(early, late)
    again = recorder.add(total, late)
    recorder.logits(again, weight((50, 64)))
    nodes = fuse(recorder.nodes, KINDS)
    assert described(nodes) == ["embed", 'quantise"', "linear1", "linear1", "add", "add", "logits"]


def test_a_norm_that_others_read_is_rounded_beside() -> None:
    """A value replaced by its int8 rounding under the eyes of an op that needs it in full."""
    recorder = Recorder(SPEC)
    x = recorder.embed(weight((50, 64)))
    h = recorder.rms_norm(x, weight((64,), "F32"), 1e-5)
    y = recorder.add(h, recorder.linear(h, weight((64, 64))))
    recorder.logits(y, weight((50, 64)))
    nodes = fuse(recorder.nodes, KINDS)
    assert described(nodes) == ["embed", "rms_norm", 'quantise"', "linear1+", "logits"]


def test_a_value_is_rounded_to_what_each_product_asks_for() -> None:
    """One rounding for two products that want different ones: a query from 8 bits, or an MLP at twice the cost."""
    recorder = Recorder(SPEC)
    x = recorder.rms_norm(recorder.embed(weight((50, 64))), weight((64,), "F32"), 1e-5)
    query = recorder.linear(x, weight((64, 64), name="attn_q.weight"))
    up, gate = recorder.linear(x, weight((64, 64))), recorder.linear(x, weight((64, 64), name="ffn_gate.weight"))
    recorder.logits(recorder.add(query, recorder.gated(gate, up, "silu")), weight((50, 64)))
    nodes = fuse(recorder.nodes, KINDS)
    products = ["quantise'", "linear1", 'quantise"', "linear2", "gated", "add"]
    assert described(nodes) == ["embed", "rms_norm", *products, "logits"]


def test_widths_are_checked_when_recorded() -> None:
    """A weight of another model, found out as a crash in a kernel."""
    recorder = Recorder(SPEC)
    x = recorder.embed(weight((50, 64)))
    with pytest.raises(ModelError, match="maps 32 lanes; its input has 64"):
        recorder.linear(x, weight((64, 32)))


def test_rope_frequencies() -> None:
    """Scale, base or factors left out of the angle."""
    rope = RopeSpec(4, theta=100.0, scale=0.5, factors=(1.0, 8.0))
    assert rope_frequencies(rope) == [0.5, 0.5 * 100.0**-0.5 / 8]


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Nodes of random types that read random earlier values; some linears have a residual."""
    values = [Value(draw(st.sampled_from([16, 32]))) for _ in range(draw(st.integers(1, 3)))]
    nodes: list[Node] = [Embed([], [value], weight((50, 64))) for value in values]
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["linear", "rope", "add", "attend"]))
        x = draw(st.sampled_from(values))
        alike = [v for v in values if v.width == x.width]
        if kind == "linear":
            outputs = [Value(width) for width in draw(st.lists(st.sampled_from([16, 32]), min_size=1, max_size=3))]
            like_output = [v for v in values if v.width == outputs[0].width]
            residual = draw(st.sampled_from([None, *like_output])) if len(outputs) == 1 else None
            nodes.append(Linear([x], outputs, [weight((64, 64))], residual=residual))
        elif kind == "rope":
            nodes.append(Rope([x], [Value(x.width)], RopeSpec(16), 16))
        elif kind == "add":
            nodes.append(Add([x, draw(st.sampled_from(alike))], [Value(x.width)]))
        else:
            nodes.append(Attend([x, draw(st.sampled_from(alike))], [Value(x.width)], 0, 1.0))
        values += nodes[-1].outputs
    return [*nodes, Logits([values[-1]], [], weight((50, 64)))]


@settings(max_examples=200, deadline=None)
@given(nodes=graphs())
def test_no_value_is_overwritten_before_its_last_reader(nodes: list[Node]) -> None:
    """Two living values in one place: answers that depend on which op ran last."""
    memory: dict[tuple[int, int], Value] = {}
    kinds: list[tuple[int, DType]] = []

    def add_buffer(width: int, dtype: DType) -> int:
        kinds.append((width, dtype))
        return len(kinds) - 1

    def cells(lanes: Lanes) -> list[tuple[int, int]]:
        buffer, first, count = lanes
        assert first + count <= kinds[buffer][0]
        return [(buffer, lane) for lane in range(first, first + count)]

    placement = Placement(add_buffer, nodes)
    for at, node in enumerate(nodes):
        read = {value: placement.lanes(value) for value in node.reads()}
        for value, lanes in read.items():
            assert all(memory[cell] is value for cell in cells(lanes))
        placement.place_outputs(node, at)
        for value in node.outputs:
            memory |= dict.fromkeys(cells(placement.lanes(value)), value)
        # An op that works in place may overwrite its first input or its residual, no other.
        for value in node.inputs[1:] if isinstance(node, Rope | Add) else node.inputs:
            in_place = value is node.inputs[0] and isinstance(node, Add)
            assert in_place or all(memory[cell] is value for cell in cells(read[value]))
        placement.release(node.reads(), at)


def test_layers_share_their_buffers() -> None:
    """An arena that grows with the number of layers."""
    nodes = llama({})
    kinds: list[tuple[int, DType]] = []

    def add_buffer(width: int, dtype: DType) -> int:
        kinds.append((width, dtype))
        return len(kinds) - 1

    placement = Placement(add_buffer, nodes)
    for at, node in enumerate(nodes[:-1]):
        placement.place_outputs(node, at)
        placement.release(node.reads(), at)
    assert sorted(kinds) == sorted(
        [(64, "f32"), (64, "int16"), (128, "f32"), (64, "f32"), (64, "int8"), (192, "f32"), (96, "int8")]
    )
