"""The GGUF reader: equal to the `gguf` package on good files, one clear line on all others."""

from __future__ import annotations

import gc
import os
import random
import struct
import time
import tracemalloc
from itertools import repeat
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from chairlift.errors import ModelFileError
from chairlift.models.gguf.reader import MAX_ELEMENTS, MAX_ENTRIES, GGUFFile
from conftest import TinyGGUF
from models.gguf import fuzz
from support.tiny_gguf import gguf_bytes, string, typed_value, write_gguf

MAPS = Path("/proc/self/maps")
VECTOR = {"x": (np.zeros(8, dtype=np.float32), "F32")}


def header(num_tensors: int, num_pairs: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def tensor_info(name: str, extents: tuple[int, ...], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    count = len(extents) if dims is None else dims
    return string(name) + struct.pack(f"<I{len(extents)}QIQ", count, *extents, kind, offset)


def refusal(raw: bytes, path: Path) -> str:
    path.write_bytes(raw)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def assert_same_as_package(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    with GGUFFile.open(path) as ours:
        fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert ours.metadata == fields
        assert [type(v) for v in ours.metadata.values()] == [type(v) for v in fields.values()]
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert mine.type_name == tensor.tensor_type.name
            assert mine.data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("weight_type", ["F32", "Q4_1"])
def test_equals_the_gguf_package_field_by_field(architecture: str, weight_type: str, tiny_gguf: TinyGGUF) -> None:
    """Guards against a misread value, a shape in the wrong order or a shifted data section."""
    assert_same_as_package(tiny_gguf(architecture, weight_type=weight_type, rope_freqs=True))


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_equals_the_gguf_package(version: int, tmp_path: Path) -> None:
    """Guards against a wrong width or sign of a metadata type that real files rarely use."""
    metadata = {k: v for k, v in fuzz.compact_metadata().items() if not k.startswith("d.")}
    assert_same_as_package(write_gguf(tmp_path / "m.gguf", metadata, VECTOR, version=version))


def test_nested_and_empty_arrays(tmp_path: Path) -> None:
    """Guards against losing the structure of nested arrays, which the gguf package flattens."""
    metadata = {"d.nested": [[1, 2], [3]], "d.words": [["a"], ["b", "c"]], "d.empty": np.arange(0, dtype="int32")}
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", metadata, VECTOR)) as file:
        assert file.metadata == {"d.nested": [[1, 2], [3]], "d.words": [["a"], ["b", "c"]], "d.empty": []}


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_moves_the_data(alignment: int, tmp_path: Path) -> None:
    """Guards against taking 32 for granted."""
    tensors = {name: (np.arange(3, dtype=np.float32) + i, "F32") for i, name in enumerate("abc")}
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, tensors, alignment=alignment)) as file:
        for i, name in enumerate("abc"):
            assert file.tensors[name].data.view("<f4").tolist() == [i, i + 1, i + 2]


def test_views_outlive_the_file_and_are_not_copies(tiny_gguf: TinyGGUF) -> None:
    """Guards against a crash when weights are read after close(), and against copying the weights at open."""
    with GGUFFile.open(tiny_gguf()) as file:
        view = file.tensors["output.weight"].data
        expected = view.tobytes()
        assert not view.flags.owndata
        assert not view.flags.writeable
    file.close()
    del file
    gc.collect()
    assert view.tobytes() == expected


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists its maps as a file")
def test_closing_lets_go_of_the_mapping(tiny_gguf: TinyGGUF) -> None:
    """Guards against a file that stays mapped for the life of the process."""
    path = tiny_gguf().resolve()
    with GGUFFile.open(path) as file:
        assert str(path) in MAPS.read_text()
    assert file.tensors == {}
    gc.collect()
    assert str(path) not in MAPS.read_text()


def test_a_vocabulary_of_50k_opens_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    """Guards against a slow string loop: opening is part of the two seconds to ready. Processor time, as others run."""
    words = [f"Ġtoken{i}" for i in range(50_000)]
    metadata = {"tokens": words, "types": [1] * len(words), "merges": [f"Ġ {w}" for w in words]}
    path = write_gguf(tmp_path / "m.gguf", metadata, VECTOR)
    times = []
    for _ in range(3):
        began = time.process_time()
        GGUFFile.open(path).close()
        times.append(time.process_time() - began)
    assert min(times) < 0.1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file but a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + bytes(40), "a safetensors file"),
        (b"tjgg" + bytes(40), "an old GGJT file"),
        (b"hello", "begins with b'hell', not b'GGUF' at byte 0"),
        (b"G", "begins with b'G'"),
        (b"GGUF\x03\x00", "has 6 bytes, and the header alone takes 24: it ends at byte 6 (the file is cut off"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file; only little-endian ones are read at byte 4"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; versions 2 and 3 are read at byte 4"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
    ],
)
def test_foreign_files_are_named(raw: bytes, expected: str, tmp_path: Path) -> None:
    """Guards against "bad magic" where the user could be told what the file is."""
    assert expected in refusal(raw, tmp_path / "m.gguf")


PAIR = string("k") + typed_value(1)
DATA = bytes(64)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (header(2**63, 0), f"claims {2**63} tensors; at most {MAX_ENTRIES} are read at byte 8"),
        (header(0, 1000), "claims 1000 key/value pairs, more than its 24 bytes can hold at byte 16"),
        (
            header(0, 1, string("k" * 20)[:-1]),
            "pair 0: key needs 20 bytes, but the file ends after 19 more at byte 32",
        ),
        (header(0, 1, struct.pack("<Q", 2**64 - 1) + bytes(20)), f"key needs {2**64 - 1} bytes"),
        (header(0, 1, string("") + bytes(20)), "key of 0 characters"),
        (header(0, 1, string("k" * 65536) + bytes(20)), "key of 65536 characters; 1 to 65535 are allowed at byte 24"),
        (header(0, 1, string(b"k\xff") + bytes(20)), "key is not valid UTF-8 at byte 33"),
        (header(0, 2, PAIR + PAIR), "pair 1: key 'k' occurs twice at byte 41"),
        (
            header(0, 1, string("k\n") + struct.pack("<I", 99) + DATA),
            r"key 'k\n': value type 99 is not known at byte 34",
        ),
        (header(0, 1, string("k") + struct.pack("<IB", 7, 2) + DATA), "key 'k': a bool of 2 at byte 37"),
        (header(0, 1, string("k") + struct.pack("<IIQ3B", 9, 7, 3, 1, 0, 9) + DATA), "a bool of 9 at byte 51"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 77, 0) + DATA), "array type 77 is not known at byte 37"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 4, 2**62)), f"an array of {2**62} elements, more than"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 9) + DATA), "an array of 9 elements, more than the file"),
        (
            header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + string(b"\xc3") + DATA),
            "string 1 is not valid UTF-8 at byte 67",
        ),
        (
            header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + struct.pack("<Q", 99)),
            "key 'k': string 1 needs 99 bytes, but the file ends after 0 more at byte 67",
        ),
        (header(0, 1, string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99), "nested more than 4 deep"),
        (header(0, 1, string("general.alignment") + typed_value("32")), "general.alignment is a str, not an integer"),
        (header(0, 1, string("general.alignment") + typed_value(0)), "general.alignment is 0; a power of two"),
        (header(0, 1, string("general.alignment") + typed_value(48)), "general.alignment is 48"),
        (header(0, 1, string("general.alignment") + typed_value(2**31)), "general.alignment is 2147483648"),
    ],
)
def test_bad_metadata_is_refused_with_its_place(raw: bytes, expected: str, tmp_path: Path) -> None:
    """Guards against counts and lengths used before they are checked, and against an error that does not say where."""
    assert expected in refusal(raw, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ([tensor_info("t", (8,)), tensor_info("t", (8,), offset=32)], "tensor 1: name 't' occurs twice at byte 57"),
        ([tensor_info("t", (), dims=0)], "tensor 't': 0 dimensions; 1 to 4 are allowed at byte 33"),
        ([tensor_info("t", (), dims=2**32 - 1)], "4294967295 dimensions"),
        ([tensor_info("t", (4, 0))], "an extent of 0 in [4, 0] at byte 37"),
        ([tensor_info("t", (2**63, 2))], "its data ends at byte"),
        ([tensor_info("t", (2**62, 2**62, 2**62, 2**62))], "its data ends at byte"),
        ([tensor_info("t", (2**32, 2**32))], "its data ends at byte"),  # the product is 0 in 64 bits
        ([tensor_info("t", (33,), kind=2)], "rows of 33 are not whole blocks of 32, as Q4_0 needs at byte 37"),
        ([tensor_info("t", (255,), kind=12)], "rows of 255 are not whole blocks of 256, as Q4_K"),
        ([tensor_info("t", (8,), kind=4)], "weight type 4 is not known at byte 45"),
        ([tensor_info("t", (8,), offset=4)], "offset 4 is not a multiple of the alignment 32 at byte 24"),
        ([tensor_info("t", (8,), offset=2**64 - 32)], "its data ends at byte"),
        ([tensor_info("t", (16,)), tensor_info("u", (8,), offset=32)], "tensor 'u': overlaps tensor 't' at byte 57"),
    ],
)
def test_bad_tensors_are_refused_with_their_place(infos: list[bytes], expected: str, tmp_path: Path) -> None:
    """Guards against overflowing products and against views that reach beyond the file or share bytes."""
    raw = header(len(infos), 0, b"".join(infos))
    assert expected in refusal(raw + bytes(-len(raw) % 32 + 64), tmp_path / "m.gguf")


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    """Guards against a truncated download that opens, whatever byte it ends at."""
    raw, path = fuzz.compact_bytes(), tmp_path / "m.gguf"
    path.write_bytes(raw)
    for length in reversed(range(len(raw))):
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)
    assert fuzz.check(raw, path) is None


def test_hostile_numbers_at_every_place_of_the_header(tmp_path: Path) -> None:
    """Guards against any one field that is believed: no other error, no hang, no large allocation."""
    raw, values = fuzz.compact_bytes(), (2**16, 2**32 - 1, 2**63, 2**64 - 1)
    tracemalloc.start()
    try:
        for at in range(4, len(raw) - 600):
            hostile = struct.pack("<Q", values[at // 8 % 4])
            fuzz.check(raw[:at] + hostile + raw[at + 8 :], tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < fuzz.MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def test_mutated_headers(tmp_path: Path) -> None:
    """Guards against what nobody thought of; the long mode is `python -m models.gguf.fuzz --seconds N`."""
    tracemalloc.start()
    try:
        path, rng = tmp_path / "mutant.gguf", random.Random(20)
        tried, opened = fuzz.run(path, rng, fuzz.sources(tmp_path), repeat(None, 1000))
    finally:
        tracemalloc.stop()
    assert 0 < opened < tried


def test_a_large_file_cannot_ask_for_gigabytes(tmp_path: Path) -> None:
    """Guards against a sparse file whose counts all fit its size: 64 MB of bytes would become a list of 0.5 GB."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1, string("k") + struct.pack("<IIQ", 9, 0, MAX_ELEMENTS + 1)))
    os.truncate(path, 1 << 33)
    with pytest.raises(ModelFileError, match=f"at most {MAX_ELEMENTS} in all are read"):
        GGUFFile.open(path)
    flags = b"".join(string(key) + typed_value(np.zeros(MAX_ELEMENTS // 2 + 1, dtype="uint8")) for key in "kl")
    assert f"at most {MAX_ELEMENTS} in all are read" in refusal(header(0, 2, flags), path)
    path.write_bytes(header(0, 1, string("k") + struct.pack("<IQ", 8, 1 << 32)))
    os.truncate(path, 1 << 33)
    with pytest.raises(ModelFileError, match="goes beyond the 67108864 bytes allowed for metadata"):
        GGUFFile.open(path)


def test_things_that_are_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback or, for a FIFO, waiting for a writer for ever."""
    cases: list[tuple[Path, str]] = [(tmp_path, "is a directory"), (tmp_path / "none.gguf", "does not exist")]
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases += [(tmp_path / "fifo", "is not a regular file"), (tmp_path / "empty", "is empty")]
    cases += [(tmp_path / "loop", "cannot be opened"), (tmp_path / "empty" / "x", "cannot be opened")]
    cases += [(tmp_path / ("n" * 300), "cannot be opened"), (tmp_path / "nul\0", "cannot be opened")]
    for path, expected in cases:
        with pytest.raises(ModelFileError, match=expected):
            GGUFFile.open(path)

    readable = write_gguf(tmp_path / "m.gguf", {}, VECTOR)

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root may read everything, so modes would not do
    with pytest.raises(ModelFileError, match="permission denied"):
        GGUFFile.open(readable)


def test_the_writer_of_the_tests_reads_back(tmp_path: Path) -> None:
    """Guards against a test writer whose files are empty: every other test here would then prove nothing."""
    raw = gguf_bytes({"general.name": "x"}, VECTOR)
    assert len(raw) % 32 == 0
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", {"general.name": "x"}, VECTOR)) as file:
        assert file.metadata == {"general.name": "x"}
        assert file.tensors["x"].shape == (8,)
