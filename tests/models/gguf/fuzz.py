"""Mutates a real GGUF header and checks that the reader answers each one with a file or with one clear error.

`test_reader.py` runs a bounded part of this; as long as told:

    PYTHONPATH=tests python -m models.gguf.fuzz --seconds N [--seed S]
"""

from __future__ import annotations

import argparse
import random
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.errors import ModelFileError
from chairlift.models.gguf import GGUFFile
from support.tiny_gguf import gguf_bytes, tiny_model

MAX_OPEN_S = 2.0
MAX_PEAK_BYTES = 16 << 20
"""The files fuzzed have some kilobytes: whatever takes more than this was believed, not checked."""

HOSTILE = (0, 1, 7, 31, 255, *(2**bits + less for bits in (16, 31, 32, 62, 63) for less in (-1, 0)), 2**40, 2**64 - 1)


def compact_metadata() -> dict[str, Any]:
    """A pair of every value type, in few bytes."""
    numbers = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]
    scalars = {f"a.{name}": np.dtype(name).type(7) for name in numbers}
    arrays = {f"b.{name}": np.arange(3, dtype=name) for name in numbers}
    rest = {"c.yes": True, "c.no": False, "c.flags": [True, False], "c.text": "né", "c.texts": ["", "ü", "日本"]}
    nested = {"d.nested": [[1, 2], [3]], "d.words": [["a"], ["b", "c"]], "d.empty": np.arange(0, dtype="int32")}
    return {"general.architecture": "llama", **scalars, **arrays, **rest, **nested}


def compact_bytes(version: int = 3) -> bytes:
    """A file of about 2 kB: every value type, tensors of one to four dimensions, the last one ending the file."""
    ramp = np.arange(64, dtype=np.float32)
    tensors = {
        "vector": (ramp[:3], "F32"),
        "matrix": (ramp.reshape(2, 32), "Q4_0"),
        "fives": (ramp.reshape(1, 64), "Q5_1"),
        "sixes": (np.tile(ramp, 4), "Q6_K"),
        "cube": (ramp.reshape(4, 4, 4), "F16"),
        "last": (ramp.reshape(1, 1, 2, 32), "F32"),
    }
    return gguf_bytes(compact_metadata(), tensors, version=version)


def check(raw: bytes, path: Path) -> ModelFileError | None:
    """Opens the bytes as a file; gives the error or None. AssertionError when the reader misbehaves."""
    path.touch()
    with path.open("r+b") as out:  # in place: emptying a file and writing it anew makes some file systems flush it
        out.write(raw)
        out.truncate()
    began = time.perf_counter()
    try:
        with GGUFFile.open(path) as file:
            total = sum(tensor.data.size for tensor in file.tensors.values())
            assert total <= len(raw), "tensors hold more bytes than the file"
            for tensor in file.tensors.values():
                tensor.data.max()
    except ModelFileError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 1000, message
        assert message.startswith(str(path)), message
        return error
    finally:
        assert time.perf_counter() - began < MAX_OPEN_S
    return None


def mutate(raw: bytes, rng: random.Random, header: int) -> bytes:
    """One to three small damages, most of them in the first `header` bytes."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        data = data or bytearray(b"G")
        at = rng.randrange(min(header, len(data)) if rng.random() < 0.95 else len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", (rng.choice(HOSTILE) + rng.randint(-1, 1)) % 2**64)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", (rng.choice(HOSTILE) + rng.randint(-1, 1)) % 2**32)
        elif kind == 3:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 4:
            other = rng.randrange(len(data))
            data[at:at] = data[other : other + rng.randint(1, 64)]
        else:
            del data[max(1, rng.randrange(len(data))) :]
    return bytes(data)


def run(path: Path, rng: random.Random, sources: list[bytes], until: Iterator[None]) -> tuple[int, int]:
    """Mutates until told to stop; gives how many were tried and how many of them opened."""
    tried = opened = 0
    headers = [min(len(raw), 12_000) for raw in sources]
    for _ in until:
        which = rng.randrange(len(sources))
        raw = mutate(sources[which], rng, headers[which])
        tracemalloc.reset_peak()
        opened += check(raw, path) is None
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES, "a small file took a large allocation"
        tried += 1
    return tried, opened


def sources(directory: Path) -> list[bytes]:
    """What is mutated: the compact file in both versions, and a tiny model with its vocabulary."""
    model = tiny_model(directory / "source.gguf", layers=1, weight_type="Q4_0").read_bytes()
    return [compact_bytes(2), compact_bytes(3), model]


def _for_seconds(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def main() -> None:
    """The long mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats an earlier run; printed at its start")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    tracemalloc.start()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "mutant.gguf"
        try:
            tried, opened = run(path, random.Random(seed), sources(directory), _for_seconds(options.seconds))
        except BaseException:
            kept = Path("fuzz-failure.gguf")
            kept.write_bytes(path.read_bytes())
            print(f"the file that did it: {kept.absolute()}", flush=True)
            raise
    print(f"{tried} mutants: {opened} opened, {tried - opened} refused in one line each")


if __name__ == "__main__":
    main()
