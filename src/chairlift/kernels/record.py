"""From a model file's calls to the ops that the compiled core replays: records them, then fuses.

Knows the op list and which weights can share a matrix; knows nothing of the core, of buffers, or of a step. A pass
takes the nodes in running order and gives them back so:

    record              linear q, k, v ... add          as the model file wrote it
    stack_linears       q, k, v -> one product          same input, same layout
    fold_residuals      add(x, linear(h)) -> product    the sum is formed as the product is written
    fold_head_norm      norm, logits -> logits          only the rows that need logits are normed
    round_inputs        norm, swiglu -> levels or bf16  what only rounding products read is rounded where it is made
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from chairlift.errors import ModelError
from chairlift.kernels.rounding import DType
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec

Kind = Literal["embed", "rms_norm", "linear", "rope", "attend", "swiglu", "add", "logits", "quantise"]


@dataclass(eq=False, slots=True)
class Value:
    """One activation, (rows, width)."""

    width: int
    dtype: DType = "f32"


@dataclass(eq=False, slots=True)
class Node:
    """One op. A stacked linear has several weights and as many outputs, side by side in one buffer."""

    kind: Kind
    inputs: list[Value]
    outputs: list[Value]
    weights: list[RawTensor] = field(default_factory=list)
    biases: list[RawTensor] = field(default_factory=list)
    residual: Value | None = None
    eps: float = 0.0
    rope: RopeSpec | None = None
    head_dim: int = 0
    layer: int = -1

    def reads(self) -> Iterator[Value]:
        """Every value it needs."""
        yield from self.inputs
        if self.residual is not None:
            yield self.residual


@dataclass(frozen=True, slots=True)
class WeightKinds:
    """How a weight is held and multiplied: the layout of its type, and what its input is rounded to."""

    layout_of: Callable[[str], str]
    input_dtype: Callable[[RawTensor], DType]


class Recorder:
    """The op list on symbols: each call appends a node."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.nodes: list[Node] = []

    def _add(self, kind: Kind, inputs: list[Value], width: int) -> Node:
        node = Node(kind, inputs, [Value(width)])
        self.nodes.append(node)
        return node

    def embed(self, table: RawTensor) -> Value:
        """Rows of the table at the step's tokens."""
        node = self._add("embed", [], table.shape[1])
        node.weights = [table]
        return node.outputs[0]

    def rms_norm(self, x: Value, weight: RawTensor, eps: float) -> Value:
        """Norm of each group of len(weight) lanes."""
        node = self._add("rms_norm", [x], x.width)
        node.weights, node.eps = [weight], eps
        return node.outputs[0]

    def linear(self, x: Value, weight: RawTensor, bias: RawTensor | None = None) -> Value:
        """x @ weight.T + bias."""
        rows, cols = weight.shape
        if cols != x.width:
            raise ModelError(f"tensor {weight.name!r} maps {cols} lanes; its input has {x.width}")
        node = self._add("linear", [x], rows)
        node.weights = [weight]
        node.biases = [] if bias is None else [bias]
        return node.outputs[0]

    def rope(self, x: Value, rope: RopeSpec, head_dim: int) -> Value:
        """Rotates each head at the step's positions."""
        node = self._add("rope", [x], x.width)
        node.rope, node.head_dim = rope, head_dim
        return node.outputs[0]

    def attend(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Writes k and v into the cache, then attention over it."""
        spec = self._spec.layers[layer]
        node = self._add("attend", [q, k, v], spec.num_heads * spec.value_dim)
        node.layer, node.head_dim = layer, spec.head_dim
        return node.outputs[0]

    def swiglu(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        return self._add("swiglu", [gate, up], gate.width).outputs[0]

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return self._add("add", [a, b], a.width).outputs[0]

    def logits(self, x: Value, head: RawTensor) -> Value:
        """linear(x, head) for the rows that need logits."""
        node = self._add("logits", [x], head.shape[0])
        node.weights = [head]
        return node.outputs[0]


def fuse(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """All passes in their order."""
    nodes = stack_linears(nodes, kinds)
    nodes = fold_residuals(nodes)
    nodes = fold_head_norm(nodes)
    return round_inputs(nodes, kinds)


def stack_linears(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """Joins linears of one input whose weights share a layout (q, k, v; gate, up) into one product."""
    stacked: list[Node] = []
    open_stacks: dict[tuple[int, str, DType, bool], Node] = {}
    for node in nodes:
        if node.kind == "linear":
            weight = node.weights[0]
            layout, dtype = kinds.layout_of(weight.type_name), kinds.input_dtype(weight)
            key = (id(node.inputs[0]), layout, dtype, bool(node.biases))
            if key in open_stacks:
                first = open_stacks[key]
                first.weights += node.weights
                first.biases += node.biases
                first.outputs += node.outputs
                continue
            open_stacks[key] = node
        stacked.append(node)
    return stacked


def count_uses(nodes: list[Node]) -> Counter[Value]:
    """How often each value is read."""
    return Counter(value for node in nodes for value in node.reads())


def fold_residuals(nodes: list[Node]) -> list[Node]:
    """Lets a product write the sum, where the add is its only reader and the other term exists before it."""
    uses = count_uses(nodes)
    made_at = {value: i for i, node in enumerate(nodes) for value in node.outputs}
    linears = {node.outputs[0]: node for node in nodes if node.kind == "linear" and len(node.outputs) == 1}
    folded: list[Node] = []
    for node in nodes:
        product = None
        if node.kind == "add":
            for term, other in (node.inputs, node.inputs[::-1]):
                linear = linears.get(term)
                if linear and uses[term] == 1 and linear.residual is None and made_at[other] < made_at[term]:
                    product, product.residual, product.outputs = linear, other, node.outputs
                    break
        if product is None:
            folded.append(node)
    return folded


def fold_head_norm(nodes: list[Node]) -> list[Node]:
    """Lets the logits norm their own rows, where nothing else reads the last norm."""
    head = nodes[-1]
    uses = count_uses(nodes)
    for node in nodes:
        if node.kind == "rms_norm" and node.outputs[0] is head.inputs[0] and uses[node.outputs[0]] == 1:
            head.weights.append(node.weights[0])
            head.eps, head.inputs = node.eps, node.inputs
            return [other for other in nodes if other is not node]
    return nodes


def can_round(node: Node) -> bool:
    """Whether the op can write rounded rows itself: a SwiGLU, or a norm of whole rows."""
    return node.kind == "swiglu" or (node.kind == "rms_norm" and node.weights[0].shape[0] == node.outputs[0].width)


def round_inputs(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """Gives products the inputs that they take: a value is rounded once, by its maker when nothing else reads it."""

    def input_dtype(node: Node) -> DType:
        return kinds.input_dtype(node.weights[0]) if node.kind == "linear" else "f32"

    uses = count_uses(nodes)
    alike = Counter((node.inputs[0], input_dtype(node)) for node in nodes if node.kind == "linear")
    makers = {value: node for node in nodes for value in node.outputs}
    rounded: dict[tuple[Value, DType], Value] = {}
    result: list[Node] = []
    for node in nodes:
        dtype = input_dtype(node)
        if dtype != "f32":
            x = node.inputs[0]
            if can_round(makers[x]) and uses[x] == alike[x, dtype]:
                x.dtype = dtype
            else:
                if (x, dtype) not in rounded:
                    rounded[x, dtype] = Value(x.width, dtype)
                    result.append(Node("quantise", [x], [rounded[x, dtype]]))
                node.inputs = [rounded[x, dtype]]
        result.append(node)
    return result
