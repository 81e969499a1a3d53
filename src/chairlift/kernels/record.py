"""Records a model file's calls: a node type per op, each of which writes itself into the compiled core's recording.

Knows the op list and the names of the core's operands; knows nothing of buffers, of fusion (`fuse.py`) or of a step.
A new op is a method of Recorder and a node type here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from chairlift.errors import ModelError
from chairlift.kernels.ops import Activation
from chairlift.kernels.rounding import DType, score_scale
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec

if TYPE_CHECKING:
    from chairlift._native import Operand

Lanes = tuple[int, int, int]
"""Buffer, first lane, number of lanes."""

NOTHING: Lanes = (-1, 0, 0)
"""Where a node without output writes."""


@dataclass(eq=False, slots=True)
class Value:
    """One activation, (rows, width)."""

    width: int
    dtype: DType = "f32"


class Writer(Protocol):
    """What nodes write themselves into."""

    def record(self, op: str, /, **operands: Operand) -> None:
        """Records one op of the core."""

    def matrix(self, tensors: Sequence[RawTensor]) -> int:
        """The number of the packed matrix of these tensors, stacked by rows."""

    def vector(self, tensors: Sequence[RawTensor]) -> int:
        """The number of the vector of these tensors, end to end."""

    def input_dtype(self, weight: RawTensor) -> DType:
        """What a product with this weight takes."""


@dataclass(eq=False, slots=True)
class Node(ABC):
    """One op. Its outputs lie side by side in one buffer."""

    inputs: list[Value]
    outputs: list[Value]

    @abstractmethod
    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """Records the op. `inputs` are the lanes of `reads()`, in that order."""

    def reads(self) -> Iterator[Value]:
        """Every value that the op reads."""
        yield from self.inputs

    def overwrites(self) -> Value | None:
        """The value whose lanes the output may take, if nothing reads it later. None: the output needs its own."""
        return None

    def can_round(self) -> bool:
        """Whether the op can write rounded rows itself."""
        return False


@dataclass(eq=False, slots=True)
class Embed(Node):
    """Rows of a table at the step's tokens."""

    table: RawTensor

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/embed.cpp takes it."""
        to.record("embed", table=to.matrix([self.table]), out=out)


@dataclass(eq=False, slots=True)
class RmsNorm(Node):
    """Norm of each group of len(weight) lanes."""

    weight: RawTensor
    eps: float

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/rms_norm.cpp takes it."""
        to.record("rms_norm", x=inputs[0], weight=to.vector([self.weight]), eps=self.eps, out=out)

    def overwrites(self) -> Value | None:
        """Its input."""
        return self.inputs[0]

    def can_round(self) -> bool:
        """A norm of whole rows can."""
        return self.weight.shape[0] == self.outputs[0].width


@dataclass(eq=False, slots=True)
class Linear(Node):
    """x @ weight.T (+ bias) (+ residual). Stacked, it has several weights and as many outputs."""

    weights: list[RawTensor]
    biases: list[RawTensor] = field(default_factory=list)
    residual: Value | None = None

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/linear.cpp takes it."""
        extra: dict[str, Operand] = {}
        if self.biases:
            extra["bias"] = to.vector(self.biases)
        if self.residual is not None:
            extra["residual"] = inputs[1]
        to.record("linear", x=inputs[0], matrix=to.matrix(self.weights), out=out, **extra)

    def reads(self) -> Iterator[Value]:
        """x and the residual."""
        yield from self.inputs
        if self.residual is not None:
            yield self.residual

    def overwrites(self) -> Value | None:
        """The residual."""
        return None if self.residual in self.inputs else self.residual


@dataclass(eq=False, slots=True)
class Rope(Node):
    """Turns each head by its row's position."""

    rope: RopeSpec
    head_dim: int

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/rope.cpp takes it."""
        frequencies = rope_frequencies(self.rope)
        to.record("rope", x=inputs[0], frequencies=frequencies, style=self.rope.style, head_dim=self.head_dim, out=out)

    def overwrites(self) -> Value | None:
        """Its input."""
        return self.inputs[0]


@dataclass(eq=False, slots=True)
class Attend(Node):
    """Writes keys and values into the cache, then attends."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: RawTensor | None = None

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """Two ops of native/ops/attend.cpp: all keys and values of the step are written before any is read."""
        queries, keys, values = inputs
        to.record("write_kv", keys=keys, values=values, layer=self.layer)
        asked = {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else to.vector([self.sinks]),
        }
        optional: dict[str, Operand] = {name: value for name, value in asked.items() if value is not None}
        to.record("attend", queries=queries, layer=self.layer, scale=score_scale(self.scale), out=out, **optional)


@dataclass(eq=False, slots=True)
class Gated(Node):
    """activation(gate) * up."""

    activation: Activation

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/gated.cpp takes it."""
        to.record("gated", gate=inputs[0], up=inputs[1], activation=self.activation, out=out)

    def overwrites(self) -> Value | None:
        """The gate."""
        return self.inputs[0]

    def can_round(self) -> bool:
        """It can."""
        return True


@dataclass(eq=False, slots=True)
class Add(Node):
    """a + b."""

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/add.cpp takes it."""
        to.record("add", a=inputs[0], b=inputs[1], out=out)

    def overwrites(self) -> Value | None:
        """a."""
        return self.inputs[0]


@dataclass(eq=False, slots=True)
class Logits(Node):
    """Norm, head product and sampling of the logit rows. It has no output: it writes the step's result."""

    head: RawTensor
    norm: RmsNorm | None = None

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/logits.cpp takes it."""
        norm: dict[str, Operand] = {}
        if self.norm is not None:
            norm = {"norm": to.vector([self.norm.weight]), "eps": self.norm.eps}
        to.record("logits", x=inputs[0], matrix=to.matrix([self.head]), input=to.input_dtype(self.head), **norm)


@dataclass(eq=False, slots=True)
class Quantise(Node):
    """Rounds rows to what the output's lanes are."""

    def emit(self, to: Writer, inputs: list[Lanes], out: Lanes) -> None:
        """As native/ops/quantise.cpp takes it."""
        to.record("quantise", x=inputs[0], out=out)


class Recorder:
    """The op list on symbols: each call appends a node. `ops.Ops` says what the ops mean."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.nodes: list[Node] = []

    def _made_by(self, node: Node) -> Value:
        self.nodes.append(node)
        return node.outputs[0]

    def embed(self, table: RawTensor) -> Value:
        """Appends an Embed."""
        return self._made_by(Embed([], [Value(table.shape[1])], table))

    def rms_norm(self, x: Value, weight: RawTensor, eps: float) -> Value:
        """Appends an RmsNorm."""
        return self._made_by(RmsNorm([x], [Value(x.width)], weight, eps))

    def linear(self, x: Value, weight: RawTensor, bias: RawTensor | None = None) -> Value:
        """Appends a Linear. ModelError when the weight does not map x."""
        rows, cols = weight.shape
        if cols != x.width:
            raise ModelError(f"tensor {weight.name!r} maps {cols} lanes; its input has {x.width}")
        return self._made_by(Linear([x], [Value(rows)], [weight], [] if bias is None else [bias]))

    def rope(self, x: Value, rope: RopeSpec, head_dim: int) -> Value:
        """Appends a Rope."""
        return self._made_by(Rope([x], [Value(x.width)], rope, head_dim))

    def attend(  # noqa: PLR0913 - all that models ask of attention
        self,
        q: Value,
        k: Value,
        v: Value,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: RawTensor | None = None,
    ) -> Value:
        """Appends an Attend."""
        spec = self._spec.layers[layer]
        out = Value(spec.num_heads * spec.value_dim)
        return self._made_by(Attend([q, k, v], [out], layer, scale, window, softcap, sinks))

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        """Appends a Gated."""
        return self._made_by(Gated([gate, up], [Value(gate.width)], activation))

    def add(self, a: Value, b: Value) -> Value:
        """Appends an Add."""
        return self._made_by(Add([a, b], [Value(a.width)]))

    def logits(self, x: Value, head: RawTensor) -> Value:
        """Appends the Logits."""
        self.nodes.append(Logits([x], [], head))
        return Value(head.shape[0])


def rope_frequencies(rope: RopeSpec) -> list[float]:
    """Radians per position of each pair, as RopeSpec defines them."""
    pairs = rope.dim // 2
    factors = rope.factors or (1.0,) * pairs
    return [rope.scale * rope.theta ** (-2.0 * i / rope.dim) / factors[i] for i in range(pairs)]
