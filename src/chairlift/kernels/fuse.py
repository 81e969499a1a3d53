"""Fuses what a model file recorded. Knows which weights can share a matrix; knows nothing of the core or of buffers.

A pass takes the nodes in running order and gives them back so:

    record              linear q, k, v ... add          as the model file wrote it
    stack_linears       q, k, v -> one product          same input, same layout
    fold_residuals      add(x, linear(h)) -> product    the sum is formed as the product is written
    fold_head_norm      norm, logits -> logits          only the rows that need logits are normed
    round_inputs        norm, gated -> levels or bf16   what only rounding products read is rounded where it is made
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.kernels.record import Add, Linear, Logits, Node, Quantise, RmsNorm, Value
from chairlift.kernels.rounding import DType
from chairlift.models.spec import RawTensor


@dataclass(frozen=True, slots=True)
class WeightKinds:
    """How a weight is held and multiplied: the layout of its type, and what its input is rounded to."""

    layout_of: Callable[[str], str]
    input_dtype: Callable[[RawTensor], DType]


def fuse(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """All passes in their order."""
    nodes = stack_linears(nodes, kinds)
    nodes = fold_residuals(nodes)
    nodes = fold_head_norm(nodes)
    return round_inputs(nodes, kinds)


def stack_linears(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """Joins linears of one input whose weights share a layout (q, k, v; gate, up) into one product."""
    stacked: list[Node] = []
    open_stacks: dict[tuple[int, str, DType, bool], Linear] = {}
    for node in nodes:
        if isinstance(node, Linear):
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
    linears = {node.outputs[0]: node for node in nodes if isinstance(node, Linear) and len(node.outputs) == 1}

    def folds(add: Add) -> bool:
        for term, other in (add.inputs, add.inputs[::-1]):
            linear = linears.get(term)
            if linear and uses[term] == 1 and linear.residual is None and made_at[other] < made_at[term]:
                linear.residual, linear.outputs = other, add.outputs
                return True
        return False

    return [node for node in nodes if not (isinstance(node, Add) and folds(node))]


def fold_head_norm(nodes: list[Node]) -> list[Node]:
    """Lets the logits norm their own rows, where nothing else reads the last norm."""
    head = nodes[-1]
    assert isinstance(head, Logits)
    uses = count_uses(nodes)
    for node in nodes:
        if isinstance(node, RmsNorm) and node.outputs[0] is head.inputs[0] and uses[node.outputs[0]] == 1:
            head.norm, head.inputs = node, node.inputs
            return [other for other in nodes if other is not node]
    return nodes


def round_inputs(nodes: list[Node], kinds: WeightKinds) -> list[Node]:
    """Gives products the inputs that they take: a value is rounded once, by its maker when nothing else reads it."""

    def input_dtype(node: Node) -> DType:
        return kinds.input_dtype(node.weights[0]) if isinstance(node, Linear) else "f32"

    uses = count_uses(nodes)
    alike = Counter((node.inputs[0], input_dtype(node)) for node in nodes if isinstance(node, Linear))
    makers = {value: node for node in nodes for value in node.outputs}
    rounded: dict[tuple[Value, DType], Value] = {}
    result: list[Node] = []
    for node in nodes:
        dtype = input_dtype(node)
        if dtype != "f32":
            x = node.inputs[0]
            if makers[x].can_round() and uses[x] == alike[x, dtype]:
                x.dtype = dtype
            else:
                if (x, dtype) not in rounded:
                    rounded[x, dtype] = Value(x.width, dtype)
                    result.append(Quantise([x], [rounded[x, dtype]]))
                node.inputs = [rounded[x, dtype]]
        result.append(node)
    return result
