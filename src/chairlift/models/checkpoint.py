"""A model at rest: what every container of models must say, and how the container of a path is chosen.

    container                         Checkpoint                      who reads it
    a GGUF file (models/gguf/)   ->   spec, tensors               ->  registry (names, shapes), plan, backend
                                      tokenizer(), chat_template  ->  boot
                                      generation                  ->  boot

Tensors have GGUF's names (`blk.0.attn_q.weight`) in every checkpoint; another container's reader maps its own names to
them. GGUF's are the only names in use that are the same for all families, and model files, error messages and
`kernels/rounding.py` have always used them. Knows no family and no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from chairlift.models.spec import ModelSpec, RawTensor
from chairlift.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A container's defaults for sampling and end tokens. None or empty: it gives none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos_ids: frozenset[int] = frozenset()  # end an answer, beside those that the tokenizer knows


class Checkpoint(Protocol):
    """An open container. Everything it returns was checked while it was opened; tensors are not decoded yet."""

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, layer by layer; how rotary pairs lie is the container's matter."""

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        """The weights by their canonical names, as views that stay valid after `close`; empty once it is closed."""

    @property
    def weight_file(self) -> Path:
        """The largest file that weights are read from; the speed of memory is measured on its bytes."""

    @property
    def chat_template(self) -> str | None:
        """The template's source; None where there is none."""

    @property
    def generation(self) -> GenerationDefaults:
        """How the model's makers want answers drawn."""

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer, which may take a while; any thread may call it. Raises ModelError."""

    def close(self) -> None:
        """Lets go of the tensors; may be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the container at a path. Raises ModelError when it is of no known kind, damaged, or cannot be served.

    Another container is one more branch here. GGUF's reader comes last and takes every path: its errors say what a
    foreign file or a folder is.
    """
    from chairlift.models.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint.open(path)
