"""Reads GGUF model files: metadata as Python values, tensors as views into the memory map. Decodes no weights.

    | magic "GGUF" | version u32 | tensors u64 | pairs u64 |           24 bytes
    | pairs:   key string, type u32, value                 |
    | tensors: name string, dims u32, extents u64 each, type u32, offset u64 |
    | padding up to `general.alignment` (32)               |
    | data: each tensor at its offset from here, aligned   |           string: length u64, then UTF-8 bytes

The file is not trusted: every count, length and offset is checked against the bytes that are there before it is used,
so that a damaged or hostile file costs one `ModelFileError`: what is wrong, and where. Format: ggml/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.errors import ModelFileError
from chairlift.models.gguf.ggml_types import GGML_TYPES
from chairlift.models.spec import RawTensor
from chairlift.text import clip

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA_BYTES = 64 << 20
"""Most bytes before the tensor data. The largest vocabularies (262k tokens with merges and scores) take about 20 MB."""
MAX_ELEMENTS = 1 << 22
"""Most array elements over all metadata: with the line above it bounds the parsed values to some hundred MB."""
MAX_ENTRIES = 1 << 16
"""Most key/value pairs, and most tensors; real files have tens and hundreds to thousands."""
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_CUT_OFF = "the file is cut off or damaged: fetch it again"
_HEADER_BYTES = 24
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint or a wheel?)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself"),
    (b"lmgg", "an old GGML file, from before GGUF"),
    (b"fmgg", "an old GGMF file, from before GGUF"),
    (b"tjgg", "an old GGJT file, from before GGUF"),
    (b"<", "a web page, not a model"),
    (b"FUGG", "a GGUF file with its magic reversed"),
)


class GGUFFile:
    """An open model file. Closing it is safe while tensor views live on.

    `metadata` holds ints, floats, bools, strings and lists of them; `tensors` holds zero-copy, read-only views.
    """

    def __init__(self, path: Path, parsed: _Parsed) -> None:
        self.path = path
        self.metadata = parsed.metadata
        self.tensors = parsed.tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Maps and checks a file. Raises ModelFileError, and nothing else, for anything wrong with it."""
        return cls(path, _Reader(path, _map(path)).read())

    def close(self) -> None:
        """Lets go of the tensors; may be called again. `metadata` stays.

        Only the tensors' views hold the map: the system unmaps the file when the last view is gone.
        """
        self.tensors = {}

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Parsed(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_name: str
    num_bytes: int
    offset: int  # from the start of the data
    at: int  # where in the file this entry stands, for errors


def _map(path: Path) -> mmap.mmap:
    try:
        # Asked before opening: opening a FIFO would wait for a writer.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(str(path), "is a directory, not a model file", hint="give the .gguf file inside it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(str(path), "is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelFileError(str(path), "is empty")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(str(path), "does not exist") from None
    except PermissionError:
        raise ModelFileError(str(path), "may not be read: permission denied") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(str(path), f"cannot be opened: {error}") from None


def _shown(text: str) -> str:
    """A name from the file, quoted, escaped and short enough for one line."""
    return repr(clip(text, 80))


class _Reader:
    """One pass over a header. `_at` is the next byte to read; `_end` bounds the header, `_size` the file."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self._path = path
        self._map = mapping
        self._size = len(mapping)
        self._end = min(self._size, MAX_METADATA_BYTES)
        self._at = 0
        self._elements_left = MAX_ELEMENTS
        self._context = ""

    def read(self) -> _Parsed:
        self._check_version()
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_pairs = self._count("key/value pairs", _MIN_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            self._pair(index, metadata)
        alignment = self._alignment(metadata)
        infos: dict[str, _TensorInfo] = {}
        for index in range(num_tensors):
            self._tensor_info(index, infos)
        return _Parsed(metadata, self._place(infos, alignment))

    def _fail(self, what: str, at: int | None = None, *, hint: str = "") -> ModelFileError:
        message = f"{self._context}: {what}" if self._context else what
        return ModelFileError(str(self._path), message, offset=self._at if at is None else at, hint=hint)

    def _check_version(self) -> None:
        start = self._map[:32]
        if start[:4] != MAGIC:
            for prefix, name in _FOREIGN:
                if start.startswith(prefix):
                    raise self._fail(f"is not a GGUF file but {name}")
            if start[8:9] == b"{":
                raise self._fail("is not a GGUF file but, it seems, a safetensors file")
            raise self._fail(f"is not a GGUF file: it begins with {start[:4]!r}, not {MAGIC!r}")
        if self._size < _HEADER_BYTES:
            what = f"has {self._size} bytes, and the header alone takes {_HEADER_BYTES}: it ends"
            raise self._fail(what, self._size, hint=_CUT_OFF)
        version: int = _U32.unpack_from(start, 4)[0]
        if int.from_bytes(start[4:8], "big") in (1, *VERSIONS):
            raise self._fail("is a big-endian GGUF file; only little-endian ones are read", 4)
        if version not in VERSIONS:
            raise self._fail(f"is GGUF version {version}; versions 2 and 3 are read", 4)
        self._at = 8

    def _need(self, num_bytes: int, what: str) -> int:
        """Checks that so many bytes are left in the header; gives where they begin and moves past them."""
        start = self._at
        if num_bytes > self._end - start:
            if self._end < self._size:
                raise self._fail(f"{what} of {num_bytes} bytes goes beyond the {self._end} bytes allowed for metadata")
            raise self._fail(
                f"{what} needs {num_bytes} bytes, but the file ends after {self._size - start} more",
                hint=_CUT_OFF,
            )
        self._at = start + num_bytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._map, self._need(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._map, self._need(8, what))[0]
        return value

    def _count(self, what: str, min_bytes: int) -> int:
        at = self._at
        count = self._u64(f"number of {what}")
        if count > MAX_ENTRIES:
            raise self._fail(f"claims {count} {what}; at most {MAX_ENTRIES} are read", at)
        if count * min_bytes > self._end - self._at:
            raise self._fail(f"claims {count} {what}, more than its {self._size} bytes can hold", at, hint=_CUT_OFF)
        return count

    def _string(self, what: str) -> str:
        at = self._at
        length = self._u64(f"length of the {what}")
        start = self._need(length, what)
        try:
            return str(self._map[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} is not valid UTF-8", at + 8 + error.start) from None

    def _name(self, what: str, taken: dict[str, Any]) -> str:
        at = self._at
        name = self._string(what)
        if not name or len(name) > MAX_NAME_BYTES:
            raise self._fail(f"{what} of {len(name)} characters; 1 to {MAX_NAME_BYTES} are allowed", at)
        if name in taken:
            raise self._fail(f"{what} {_shown(name)} occurs twice", at)
        return name

    def _pair(self, index: int, metadata: dict[str, Any]) -> None:
        self._context = f"key/value pair {index}"
        key = self._name("key", metadata)
        self._context = f"key {_shown(key)}"
        metadata[key] = self._value(self._u32("value type"), depth=0)
        self._context = ""

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string("string")
        if kind == _ARRAY:
            return self._array(depth + 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._fail(f"value type {kind} is not known", self._at - 4)
        at = self._need(scalar.size, "value")
        value = scalar.unpack_from(self._map, at)[0]
        if kind != _BOOL:
            return value
        if value > 1:
            raise self._fail(f"a bool of {value}", at)
        return bool(value)

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise self._fail(f"arrays nested more than {MAX_DEPTH} deep")
        kind = self._u32("array type")
        at = self._at
        length = self._u64("array length")
        scalar = _SCALARS.get(kind)
        if scalar is None and kind not in (_STRING, _ARRAY):
            raise self._fail(f"array type {kind} is not known", at - 4)
        min_bytes = scalar.size if scalar else 8 if kind == _STRING else 12
        if length * min_bytes > self._end - self._at:
            raise self._fail(f"claims an array of {length} elements, more than the file can hold", at, hint=_CUT_OFF)
        if length > self._elements_left:
            raise self._fail(f"an array of {length} elements; at most {MAX_ELEMENTS} in all are read", at)
        self._elements_left -= length
        if scalar is not None:
            return self._scalars(kind, scalar, length)
        if kind == _STRING:
            return self._strings(length)
        return [self._array(depth + 1) for _ in range(length)]

    def _scalars(self, kind: int, scalar: struct.Struct, length: int) -> list[Any]:
        start = self._need(length * scalar.size, "array")
        values: npt.NDArray[Any] = np.frombuffer(self._map[start : self._at], dtype=np.dtype(scalar.format))
        if kind == _BOOL:
            if length and values.max() > 1:
                wrong = int(np.argmax(values > 1))
                raise self._fail(f"a bool of {values[wrong]}", start + wrong)
            values = values.astype(np.bool_)
        plain: list[Any] = values.tolist()
        return plain

    def _strings(self, length: int) -> list[str]:
        """The hot loop of opening a file (100,000 strings in the default model): locals, no calls into self."""
        data, at, end, unpack = self._map, self._at, self._end, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(length):
                start = at + 8
                if start > end:
                    break
                stop = start + unpack(data, at)[0]
                if stop > end:
                    break
                append(data[start:stop].decode())
                at = stop
        except UnicodeDecodeError as error:
            raise self._fail(f"string {len(strings)} is not valid UTF-8", start + error.start) from None
        self._at = at
        if len(strings) < length:
            self._string(f"string {len(strings)}")  # fails: says which string, and how much is missing
        return strings

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int:
            raise self._fail(f"general.alignment is a {type(value).__name__}, not an integer")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._fail(f"general.alignment is {value}; a power of two from 8 to {MAX_ALIGNMENT} is allowed")
        return value

    def _tensor_info(self, index: int, infos: dict[str, _TensorInfo]) -> None:
        self._context = f"tensor {index}"
        start = self._at
        name = self._name("name", infos)
        self._context = f"tensor {_shown(name)}"
        at = self._at
        num_dims = self._u32("number of dimensions")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self._fail(f"{num_dims} dimensions; 1 to {MAX_DIMENSIONS} are allowed", at)
        at = self._at
        extents = tuple(self._u64("extent") for _ in range(num_dims))
        type_at = self._at
        kind = GGML_TYPES.get(self._u32("type"))
        if kind is None:
            raise self._fail(f"weight type {_U32.unpack_from(self._map, type_at)[0]} is not known", type_at)
        offset = self._u64("offset")
        num_elements = 1
        for extent in extents:
            num_elements *= extent  # Python integers do not overflow
        if num_elements == 0:
            raise self._fail(f"an extent of 0 in {list(extents)}", at)
        if extents[0] % kind.block:
            raise self._fail(f"rows of {extents[0]} are not whole blocks of {kind.block}, as {kind.name} needs", at)
        num_bytes = num_elements // kind.block * kind.block_bytes
        infos[name] = _TensorInfo(name, extents[::-1], kind.name, num_bytes, offset, start)
        self._context = ""

    def _place(self, infos: dict[str, _TensorInfo], alignment: int) -> dict[str, RawTensor]:
        """Views of the tensors, in the file's order; each inside the file, aligned, and apart from the others."""
        data_start = -(-self._at // alignment) * alignment
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        free_from, before = 0, ""
        for info in sorted(infos.values(), key=lambda info: info.offset):
            self._context = f"tensor {_shown(info.name)}"
            if info.offset % alignment:
                raise self._fail(f"offset {info.offset} is not a multiple of the alignment {alignment}", info.at)
            end = data_start + info.offset + info.num_bytes
            if end > self._size:
                raise self._fail(
                    f"its data ends at byte {end}, but the file has {self._size} bytes; its entry stands",
                    info.at,
                    hint=_CUT_OFF,
                )
            if info.offset < free_from:
                raise self._fail(f"overlaps tensor {_shown(before)}", info.at)
            free_from, before = info.offset + info.num_bytes, info.name
        views = {}
        for info in infos.values():
            start = data_start + info.offset
            views[info.name] = RawTensor(info.name, info.shape, info.type_name, whole[start : start + info.num_bytes])
        return views
