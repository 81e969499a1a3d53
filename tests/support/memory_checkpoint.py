"""Tiny models that no file holds: raw tensors for the readers' tests, and a `Checkpoint` that is no GGUF.

`MemoryCheckpoint` has the weights and the vocabulary of `tiny_gguf.tiny_model`, described without a GGUF key: what
answers from both alike knows no container.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from chairlift.kernels.ops import F32
from chairlift.models.checkpoint import GenerationDefaults
from chairlift.models.spec import LayerSpec, ModelSpec, RawTensor, RopeSpec
from chairlift.models.tokenizer import GPT2, Tokenizer, Vocabulary
from support.tiny_gguf import CHATML, MERGES, SPECIALS, Shape, byte_characters, model_tensors
from support.weight_encoders import ENCODERS


def raw_tensor(name: str, array: F32, type_name: str = "F32") -> RawTensor:
    """An array as a container would hold it."""
    return RawTensor(name, array.shape, type_name, np.frombuffer(ENCODERS[type_name](array), np.uint8))


def raw_tensors(shape: Shape) -> dict[str, RawTensor]:
    """The tensors of a tiny model."""
    return {name: raw_tensor(name, array, kind) for name, (array, kind) in model_tensors(shape).items()}


class MemoryCheckpoint:
    """A tiny model in memory. `weight_file` is any file: the speed of memory is measured on it."""

    def __init__(self, shape: Shape, weight_file: Path) -> None:
        self.weight_file = weight_file
        self.tensors: Mapping[str, RawTensor] = raw_tensors(shape)
        self.chat_template: str | None = CHATML
        self.generation = GenerationDefaults()
        self.is_closed = False
        # The arrays are those of a GGUF file, so rotary pairs lie as its converter leaves them.
        style: Literal["interleaved", "halves"] = "interleaved" if shape.architecture == "llama" else "halves"
        layer = LayerSpec(
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.values,
            rope=RopeSpec(shape.head_dim, shape.rope_theta, style),
        )
        self.spec = ModelSpec(
            architecture=shape.architecture,
            name=f"tiny-{shape.architecture}",
            hidden_size=shape.hidden,
            ffn_size=shape.ffn,
            vocab_size=len(self._tokens()),
            context_length=shape.context,
            rms_eps=float(np.float32(shape.rms_eps)),
            layers=(layer,) * shape.layers,
        )

    @staticmethod
    def _tokens() -> list[str]:
        return byte_characters() + [merge.replace(" ", "") for merge in MERGES] + list(SPECIALS)

    def tokenizer(self) -> Tokenizer:
        """The byte-level tokenizer of the tiny models."""
        tokens = self._tokens()
        bos, end = tokens.index("<|bos|>"), tokens.index("<|im_end|>")
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
        return Tokenizer(
            Vocabulary(
                tokens=tokens,
                merges=merges,
                pre_tokenizer=GPT2,
                control=[tokens.index(token) for token in SPECIALS],
                bos_id=bos,
                eos_ids=frozenset({end}),
                special_tokens={"bos_token": tokens[bos], "eos_token": tokens[end]},
            )
        )

    def close(self) -> None:
        """Lets go of the tensors."""
        self.tensors, self.is_closed = {}, True

    def __enter__(self) -> MemoryCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
