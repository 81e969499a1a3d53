"""Models with the dimensions of large ones and random weights, to measure speed with: they say nothing of any sense.

A shape is a GGUF file that any GGUF reader loads. Tokenizer and chat template are a real model's, and so is its small
vocabulary; a larger one would only add to the head. Blocks are drawn as bytes, with scales that keep every product near
the size of its input, so that activations stay finite through any number of layers.

    scripts/make-shape 1b Q4_0 shape.gguf
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import ChairliftError
from chairlift.models import llama, quant
from chairlift.models.gguf import DEFAULT_ALIGNMENT, MAGIC, GGUFFile
from chairlift.models.registry import EMBEDDING, HEAD
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec

U8 = npt.NDArray[np.uint8]

CHUNK_BYTES = 16 << 20
"""Drawn and written at a time: the file need not fit into memory."""
FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
"""Weight types that can be drawn, and how `general.file_type` counts them."""
_TYPE_NUMBERS = {kind.name: number for number, kind in quant.GGML_TYPES.items()}
_TYPES = {kind.name: kind for kind in quant.GGML_TYPES.values()}
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where in a block its 16-bit scale stands, and its minimum."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model of the Llama family; `tied`: its head is the embedding table."""

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
"""As Llama 3.2 1B, Llama 3.2 3B and Llama 3.1 8B have them."""

Extents = Mapping[str, tuple[int, ...]]
Progress = Callable[[int, int], None]
"""Told bytes written and bytes in all."""


def write_shape(
    path: Path, shape: Shape, weight_type: str, source: Path, *, seed: int = 0, progress: Progress | None = None
) -> None:
    """Writes a model of that shape with the vocabulary of the GGUF file `source`; the same seed gives the same bytes.

    Raises ModelFileError for a source that cannot be read, ChairliftError for one without a vocabulary.
    """
    with GGUFFile.open(source) as file:
        vocabulary = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokens = vocabulary.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ChairliftError(f"{source} has no vocabulary to take")
    extents = tensor_extents(shape, len(tokens))
    types = {name: weight_type if len(extent) == 2 else "F32" for name, extent in extents.items()}
    sizes = {name: quant.bytes_of(types[name], int(np.prod(extent))) for name, extent in extents.items()}
    head = header(metadata(shape, weight_type, len(tokens)) | vocabulary, extents, types, sizes)
    rng = np.random.Generator(np.random.SFC64(seed))
    done, total = 0, len(head) + sum(map(_padded, sizes.values()))
    with path.open("wb") as out:
        done += out.write(head)
        for name, extent in extents.items():
            for chunk in draw(rng, types[name], extent):
                done += out.write(chunk.data)
                if progress is not None:
                    progress(done, total)
            done += out.write(bytes(_padded(sizes[name]) - sizes[name]))


def tensor_extents(shape: Shape, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor and its extents, rows first, in the order of the file."""
    extents: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, shape.hidden), "output_norm.weight": (shape.hidden,)}
    if not shape.tied:
        extents[HEAD] = (vocab, shape.hidden)
    layer = llama.layer_shapes(_spec(shape, vocab))
    for index in range(shape.layers):
        extents |= {f"blk.{index}.{name}": extent for name, extent in layer.items()}
    return extents


def metadata(shape: Shape, weight_type: str, vocab: int) -> dict[str, Any]:
    """The model's own keys; Llama 3's angles, without the stretching that long contexts add."""
    return {
        "general.architecture": "llama",
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
    return ModelSpec(
        architecture="llama",
        name="random",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_size=shape.ffn,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        vocab_size=vocab,
        context_length=shape.context,
        rms_eps=1e-5,
        rope=RopeSpec(shape.head_dim),
    )


def header(keys: Mapping[str, Any], extents: Extents, types: Mapping[str, str], sizes: Mapping[str, int]) -> bytes:
    """All of a GGUF file before its tensor data, padding included; models/gguf.py has the picture."""
    out = bytearray(MAGIC + struct.pack("<IQQ", 3, len(extents), len(keys)))
    for key, value in keys.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, extent in extents.items():
        out += _string(name) + struct.pack(f"<I{len(extent)}Q", len(extent), *reversed(extent))
        out += struct.pack("<IQ", _TYPE_NUMBERS[types[name]], offset)
        offset += _padded(sizes[name])
    return bytes(out.ljust(_padded(len(out)), b"\0"))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Type number and value: bool, u32, f32, string, or an array of i32, f32 or strings, as tokenizers have them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if all(isinstance(part, str) for part in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    number, form = (6, "<f4") if any(isinstance(part, float) for part in value) else (5, "<i4")
    return struct.pack("<IIQ", 9, number, len(value)) + np.array(value, form).tobytes()


def draw(rng: np.random.Generator, weight_type: str, extent: tuple[int, ...]) -> Iterator[U8]:
    """A tensor's bytes in chunks: ones for a norm, else random blocks whose rows have length near 1."""
    if weight_type == "F32":
        yield np.ones(extent, "<f4").view(np.uint8)
        return
    kind = _TYPES[weight_type]
    num_blocks = int(np.prod(extent)) // kind.block
    for start in range(0, num_blocks, CHUNK_BYTES // kind.block_bytes):
        count = min(CHUNK_BYTES // kind.block_bytes, num_blocks - start)
        yield draw_blocks(rng, weight_type, count, extent[-1] ** -0.5).reshape(-1)


def draw_blocks(rng: np.random.Generator, weight_type: str, count: int, std: float) -> U8:
    """(count, bytes of a block): random levels, scaled so that the weights' root mean square is `std`.

    Levels need not be centred on 0: a sign for each block takes the mean away, which would add up from layer to layer.
    """
    block_bytes = _TYPES[weight_type].block_bytes
    blocks = np.frombuffer(rng.bytes(count * block_bytes), np.uint8).reshape(count, block_bytes).copy()
    signs = 1.0 - 2.0 * rng.integers(0, 2, (count, 1))
    _set_scales(blocks, weight_type, std / _size_at_scale_1(weight_type) * signs)
    return blocks


def _set_scales(blocks: U8, weight_type: str, scales: npt.NDArray[np.floating]) -> None:
    """Writes a block's scale, and its minimum where it has one, (count, 1)."""
    for at in _HALVES[weight_type]:
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)


@cache
def _size_at_scale_1(weight_type: str) -> float:
    """Root mean square of random weights of a type whose scales are 1."""
    block = _TYPES[weight_type]
    blocks = np.random.default_rng(0).integers(0, 256, (4096, block.block_bytes), np.uint8)
    _set_scales(blocks, weight_type, np.ones((len(blocks), 1)))
    weights = quant.dequantise(RawTensor("", (len(blocks), block.block), weight_type, blocks.reshape(-1)))
    return float(np.sqrt(np.mean(np.square(weights, dtype=np.float64))))


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
