"""What a model is: the numbers that its forward pass, the arithmetic and the start card need, and its raw tensors.

Every container's reader makes these values; nothing here knows a container.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021).

    `style` says which two lanes rotate together: "interleaved" (2i, 2i + 1) or "halves" (i, i + dim/2). The container's
    reader sets it, since it depends on how the rows of Q and K are stored: GGUF permutes those of the Llama family.
    Angle of pair i at position p: p * scale * theta ** (-2 i / dim) / factors[i].
    """

    dim: int  # leading lanes of each head that rotate
    theta: float = 10000.0
    style: Literal["interleaved", "halves"] = "interleaved"
    scale: float = 1.0  # 1 / factor of linear position scaling
    factors: tuple[float, ...] = ()  # one per pair (Llama 3's `rope_freqs`); empty: all 1


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer; all counts, no bytes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    rope: RopeSpec
    window: int | None = None  # positions that a row sees, its own included; None: all up to its own
    kind: Literal["attention"] = "attention"

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of a decoder; all counts, no bytes. `layers` describes each layer by itself."""

    architecture: str  # the family's name in the registry: "llama", "qwen3", ...
    name: str
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int  # positions that can be served
    rms_eps: float
    layers: tuple[LayerSpec, ...]
    context_note: str = ""  # why context_length is less than the model was trained for; empty where it is not

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class RawPart:
    """A named part of a tensor beside its data: scales, zero points or an order of columns, in a type of its own."""

    shape: tuple[int, ...]  # row-major
    type_name: str
    data: npt.NDArray[np.uint8]  # flat bytes


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its container holds it: a view into mapped memory, nothing decoded.

    `shape` is in row-major order: (rows, columns) for a matrix that maps columns to rows; (n,) for a vector. Formats
    that keep scales between the weights, as GGML's blocks do, have `data` alone. Where a container keeps scales or zero
    points apart (GPTQ, AWQ), `data` holds the codes and `parts` the rest, by name.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str  # a name in quant.FORMATS: "F32", "Q4_1", ...
    data: npt.NDArray[np.uint8]  # flat bytes
    parts: Mapping[str, RawPart] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the data and of all parts."""
        return self.data.nbytes + sum(part.data.nbytes for part in self.parts.values())

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n
