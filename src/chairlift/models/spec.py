"""What a model is: the numbers that its forward pass, the arithmetic and the start card need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021).

    `style` says which two lanes rotate together: "interleaved" (2i, 2i+1), as GGUF stores the Llama family, or "halves"
    (i, i + dim/2), as Qwen. Angle of pair i at position p: p * scale * theta ** (-2 i / dim) / factors[i].
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
    """Dimensions of a decoder; all counts, no bytes. What depends on the layer stands in `layers`, one entry each."""

    architecture: str  # of the family: "llama", "qwen3", ...
    name: str
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int  # what it was trained for
    rms_eps: float
    layers: tuple[LayerSpec, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file holds it: a view into the mmap, nothing decoded.

    `shape` is in row-major order: (rows, columns) for a matrix that maps columns to rows; (n,) for a vector.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str  # GGML's name: "F32", "Q4_1", ...
    data: npt.NDArray[np.uint8]  # flat bytes

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n
