"""Writes models with the dimensions of large ones and random weights, to measure speed with.

Their answers mean nothing, but any GGUF reader loads them. Tokenizer, chat template and vocabulary are those of a real,
small model; a larger vocabulary would only add to the output head. The `gguf` package writes the file (extra `shapes`).

    scripts/make-shape 1b Q4_0 shape.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from chairlift.errors import ChairliftError
from chairlift.microbench.random_weights import draw
from chairlift.models import llama, quant
from chairlift.models.gguf import GGUFFile
from chairlift.models.registry import EMBEDDING, HEAD
from chairlift.models.spec import LayerSpec, ModelSpec, RopeSpec

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
"""Weight types that can be drawn, and their numbers in `general.file_type`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model of the Llama family. `tied`: the output head is the embedding table."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    context: int = 32768


SHAPES = {
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True),
    "3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, ffn=8192, tied=True),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, tied=False),
}
"""The dimensions of Llama 3.2 1B, Llama 3.2 3B and Llama 3.1 8B."""

Progress = Callable[[int, int], None]
"""Called with the bytes written and the bytes in all."""


def write_shape(
    path: Path, shape: Shape, weight_type: str, source: Path, *, seed: int = 0, progress: Progress | None = None
) -> None:
    """Writes a model of that shape with the vocabulary of the GGUF file `source`; the same seed gives the same bytes.

    Raises ModelFileError for a source that cannot be read, ChairliftError for one without a vocabulary or if the
    package `gguf` is missing.
    """
    try:
        import gguf
    except ImportError:
        raise ChairliftError("the package gguf is missing", hint="pip install '.[shapes]'") from None
    with GGUFFile.open(source) as file:
        vocabulary = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokens = vocabulary.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ChairliftError(f"{source} has no vocabulary to take")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata(shape, weight_type, len(tokens)) | vocabulary).items():
        _add(writer, key, value)
    types, sizes = {}, {}
    extents = tensor_extents(shape, len(tokens))
    for name, extent in extents.items():
        types[name] = weight_type if len(extent) == 2 else "F32"
        sizes[name] = quant.bytes_of(types[name], int(np.prod(extent)))
        kind = gguf.GGMLQuantizationType[types[name]]
        writer.add_tensor_info(name, extent, np.dtype(np.float32), sizes[name], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (out,) = writer.fout
    writer.write_padding(out, out.tell())
    rng = np.random.Generator(np.random.SFC64(seed))
    total = out.tell() + sum(gguf.GGUFWriter.ggml_pad(size, writer.data_alignment) for size in sizes.values())
    for name, extent in extents.items():
        for chunk in draw(rng, types[name], extent):
            out.write(chunk.data)
            if progress is not None:
                progress(out.tell(), total)
        writer.write_padding(out, sizes[name])
    if progress is not None:
        progress(out.tell(), total)
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """A key of the metadata: bool, u32, f32, string, or an array of i32, f32 or strings, as tokenizers have them."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(map(float, value)) if any(isinstance(part, float) for part in value) else value)


def tensor_extents(shape: Shape, vocab: int) -> dict[str, tuple[int, ...]]:
    """The extents of every tensor, rows first, in the order of the file."""
    extents: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, shape.hidden), "output_norm.weight": (shape.hidden,)}
    if not shape.tied:
        extents[HEAD] = (vocab, shape.hidden)
    spec = _spec(shape, vocab)
    layer = llama.layer_shapes(spec, spec.layers[0])
    for index in range(shape.layers):
        extents |= {f"blk.{index}.{name}": extent for name, extent in layer.items()}
    return extents


def metadata(shape: Shape, weight_type: str, vocab: int) -> dict[str, Any]:
    """The keys of the model; its rotary angles are those of Llama 3, without the scaling for long contexts."""
    return {
        "general.name": f"random {shape.layers} x {shape.hidden}",
        "general.file_type": FILE_TYPES[weight_type],
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.ffn,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": vocab,
    }


def _spec(shape: Shape, vocab: int) -> ModelSpec:
    layer = LayerSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, RopeSpec(shape.head_dim))
    return ModelSpec(
        architecture="llama",
        name="random",
        hidden_size=shape.hidden,
        ffn_size=shape.ffn,
        vocab_size=vocab,
        context_length=shape.context,
        rms_eps=1e-5,
        layers=(layer,) * shape.layers,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line of scripts/make-shape."""
    parser = argparse.ArgumentParser(prog="make-shape", description="Writes a GGUF model of random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("weights", choices=FILE_TYPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--like", type=Path, help="GGUF file whose vocabulary to take (default: the default model)")
    parser.add_argument("--layers", type=int, help="as many layers only")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape]
    try:
        source = given.like or _default_model()
        write_shape(
            given.file,
            shape if given.layers is None else replace(shape, layers=given.layers),
            given.weights,
            source,
            progress=_Meter(sys.stderr),
        )
    except ChairliftError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(f"{given.file}: {given.file.stat().st_size / 1e6:,.0f} MB", file=sys.stderr)
    return 0


def _default_model() -> Path:
    from chairlift import config, store

    return store.resolve("smollm2", config.load({}).cache_dir)


class _Meter:
    """Whole percents on one line."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent > self._shown:
            self._shown = percent
            self._out.write(f"\r{percent} %" + ("\n" if done == total else ""))
            self._out.flush()


if __name__ == "__main__":
    sys.exit(main())
