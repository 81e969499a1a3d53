"""A tiny random model written as a real GGUF file: what most tests run on, with no weights to download.

Owns a small GGUF writer and a byte-level tokenizer whose 256 byte tokens make every text encodable. Independent of
`chairlift.models`, as are the quantisers of `weight_encoders.py`: a misreading there is not mirrored here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.weight_encoders import ENCODERS

F32 = npt.NDArray[np.float32]
Tensors = Mapping[str, tuple[F32, str]]

SCALAR_TYPES: dict[str, tuple[int, str]] = {
    "uint8": (0, "<B"),
    "int8": (1, "<b"),
    "uint16": (2, "<H"),
    "int16": (3, "<h"),
    "uint32": (4, "<I"),
    "int32": (5, "<i"),
    "float32": (6, "<f"),
    "bool": (7, "<?"),
    "uint64": (10, "<Q"),
    "int64": (11, "<q"),
    "float64": (12, "<d"),
}
STRING, ARRAY = 8, 9
CONTROL = 3
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
TENSOR_TYPES |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
WEIGHT_TYPES = tuple(TENSOR_TYPES)
WIDE = {"hidden": 256, "head_dim": 64, "ffn": 256}
"""Dimensions that are whole blocks of 256, which K formats need."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "e r", "Ġt he", "o n", "Ġ Ġ", "r e", "Ġ s", "a t", "l l")
SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")


def string(text: str | bytes) -> bytes:
    """A GGUF string: length as u64, then the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _scalar_type(value: object) -> str:
    if isinstance(value, np.generic):
        return value.dtype.name
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "uint32" if 0 <= value < 2**32 else "int32" if -(2**31) <= value < 0 else "int64"
    if isinstance(value, float):
        return "float32"
    raise TypeError(f"no GGUF type for {value!r}")


def typed_value(value: Any) -> bytes:
    """Type number and value. Python numbers become u32/i32, f32, bool; numpy scalars and arrays keep their own type."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", STRING) + string(value)
    if isinstance(value, list | tuple | np.ndarray):
        return struct.pack("<I", ARRAY) + _array(value)
    number, form = SCALAR_TYPES[_scalar_type(value)]
    return struct.pack("<I", number) + struct.pack(form, value)


def _array(values: Sequence[Any] | npt.NDArray[Any]) -> bytes:
    if len(values) > 0 and isinstance(values[0], str | bytes):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(string(v) for v in values)
    if len(values) > 0 and isinstance(values[0], list | tuple):
        return struct.pack("<IQ", ARRAY, len(values)) + b"".join(_array(v) for v in values)
    if not isinstance(values, np.ndarray):
        kinds = {_scalar_type(v) for v in values} or {"int32"}
        name = kinds.pop() if len(kinds) == 1 else "int32"
        values = np.array(values, dtype="int32" if name == "uint32" else name)
    number, form = SCALAR_TYPES[values.dtype.name]
    return struct.pack("<IQ", number, len(values)) + values.astype(form).tobytes()


def gguf_bytes(metadata: Mapping[str, Any], tensors: Tensors, *, version: int = 3, alignment: int = 32) -> bytes:
    """A whole GGUF file. Tensor shapes are numpy's (row-major); the file holds them reversed."""
    infos, data = bytearray(), bytearray()
    for name, (array, type_name) in tensors.items():
        infos += string(name) + struct.pack("<I", array.ndim) + struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
        infos += struct.pack("<IQ", TENSOR_TYPES[type_name], len(data))
        raw = ENCODERS[type_name](array)
        data += raw + bytes(-len(raw) % alignment)
    if alignment != 32:
        metadata = {"general.alignment": alignment, **metadata}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + typed_value(value) for key, value in metadata.items()) + infos
    return bytes(head + bytes(-len(head) % alignment) + data)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Tensors, *, version: int = 3, alignment: int = 32
) -> Path:
    """Writes `gguf_bytes` to a file; `tensors` maps a name to (float32 array, type name)."""
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (Radford et al. 2019): printable ones for themselves,
    the rest from U+0100 on in ascending order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_metadata(vocab: int | None = None, *, add_bos: bool = False, pre: str = "gpt-2") -> dict[str, Any]:
    """A byte-level vocabulary: ids 0..255 are the bytes, then one token a merge, then the specials, then unused ones.

    Ends of turn: `<|im_end|>` is EOS. `vocab` pads to that many tokens; None takes just what there is.
    """
    tokens = byte_characters() + [merge.replace(" ", "") for merge in MERGES] + list(SPECIALS)
    types = [1] * (len(tokens) - len(SPECIALS)) + [CONTROL] * len(SPECIALS)
    num_unused = 0 if vocab is None else vocab - len(tokens)
    if num_unused < 0:
        raise ValueError(f"vocab={vocab} is below the {len(tokens)} tokens that the tokenizer needs")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"<|unused_{i}|>" for i in range(num_unused)],
        "tokenizer.ggml.token_type": types + [5] * num_unused,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": CHATML,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a tiny model; see `tiny_model`. `types`: (part of a name, type) where not weight_type."""

    architecture: str = "llama"
    weight_type: str = "F32"
    types: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    ffn: int = 96
    vocab: int | None = None
    context: int = 512
    tied: bool = False
    rope_freqs: bool = False
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    add_bos: bool = False

    @property
    def values(self) -> int:
        """Lanes of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim


def model_metadata(shape: Shape) -> dict[str, Any]:
    """The metadata of a tiny model, tokenizer included. Head sizes are written where they are not hidden / heads."""
    arch = shape.architecture
    numbers: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.rope_theta,
    }
    if arch == "qwen3" or shape.head_dim * shape.heads != shape.hidden or shape.values != shape.head_dim:
        numbers |= {"attention.key_length": shape.head_dim, "attention.value_length": shape.values}
    if arch == "llama":
        numbers["rope.dimension_count"] = shape.head_dim
    tokenizer = tokenizer_metadata(shape.vocab, add_bos=shape.add_bos)
    general = {"general.architecture": arch, "general.name": f"tiny-{arch}"}
    sizes = {f"{arch}.{key}": value for key, value in numbers.items()}
    return {**general, **sizes, f"{arch}.vocab_size": len(tokenizer["tokenizer.ggml.tokens"]), **tokenizer}


def model_tensors(shape: Shape) -> dict[str, tuple[F32, str]]:
    """Random tensors of a tiny model: matrices in `weight_type`, norms, biases and rope factors in F32.

    Scales keep activations near 1 and logits near 2, so that sampling has something to choose from.
    """
    rng = np.random.default_rng(shape.seed)
    vocab = len(tokenizer_metadata(shape.vocab)["tokenizer.ggml.tokens"])

    def matrix(rows: int, cols: int, std: float | None = None) -> tuple[F32, str]:
        scale = cols**-0.5 if std is None else std
        return (rng.standard_normal((rows, cols)) * scale).astype(np.float32), shape.weight_type

    def vector(size: int, mean: float) -> tuple[F32, str]:
        return (mean + 0.2 * rng.standard_normal(size)).astype(np.float32), "F32"

    def layer(prefix: str) -> Iterator[tuple[str, tuple[F32, str]]]:
        widths = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
        widths["v"] = shape.kv_heads * shape.values
        yield f"{prefix}.attn_norm.weight", vector(shape.hidden, 1.0)
        for part, width in widths.items():
            yield f"{prefix}.attn_{part}.weight", matrix(width, shape.hidden)
            if shape.architecture == "qwen2":
                yield f"{prefix}.attn_{part}.bias", vector(width, 0.0)
            if shape.architecture == "qwen3" and part != "v":
                yield f"{prefix}.attn_{part}_norm.weight", vector(shape.head_dim, 1.0)
        yield f"{prefix}.attn_output.weight", matrix(shape.hidden, shape.heads * shape.values)
        yield f"{prefix}.ffn_norm.weight", vector(shape.hidden, 1.0)
        yield f"{prefix}.ffn_gate.weight", matrix(shape.ffn, shape.hidden)
        yield f"{prefix}.ffn_up.weight", matrix(shape.ffn, shape.hidden)
        yield f"{prefix}.ffn_down.weight", matrix(shape.hidden, shape.ffn)

    tensors = {"token_embd.weight": matrix(vocab, shape.hidden, 0.3)}
    for index in range(shape.layers):
        tensors.update(layer(f"blk.{index}"))
    tensors["output_norm.weight"] = vector(shape.hidden, 1.0)
    if not shape.tied:
        tensors["output.weight"] = matrix(vocab, shape.hidden, 2 * shape.hidden**-0.5)
    if shape.rope_freqs:
        tensors["rope_freqs.weight"] = np.linspace(1, 8, shape.head_dim // 2, dtype=np.float32), "F32"
    return tensors


def tiny_model(
    path: Path, architecture: str = "llama", *, metadata: Mapping[str, Any] | None = None, **shape: Any
) -> Path:
    """Writes a random model and its tokenizer as a GGUF file and gives its path back.

    `architecture` is llama, qwen2 (q/k/v biases) or qwen3 (q/k norms, explicit head sizes); keywords are the fields of
    `Shape` (`weight_type`, `seed`, `hidden`, ..., `tied`, `rope_freqs`); `metadata` overrides keys, None removing one.
    A weight type of K formats makes it WIDE.
    """
    wide = WIDE if str(shape.get("weight_type")).endswith("_K") else {}
    dimensions = Shape(architecture, **{**wide, **shape})
    keys = {**model_metadata(dimensions), **(metadata or {})}
    tensors = model_tensors(dimensions)
    for part, type_name in dimensions.types:
        tensors |= {name: (array, type_name) for name, (array, _) in tensors.items() if part in name}
    return write_gguf(path, {k: v for k, v in keys.items() if v is not None}, tensors)
