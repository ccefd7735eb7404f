"""The bytes of one safetensors file as a pure function of its contents.

::

    | 8 bytes: length n | n bytes: JSON header, padded with blanks | tensors, no gaps |

The writer and the reader call the same function: a reader that knows a file's tensors from the
manifest knows its exact header, compares it, and never has to parse one.

The manifest has a checksum of each piece: 64-bit xxh3 (xxHash, https://xxhash.com), which runs at
memory speed. Version 1 of the format had crc32, which takes three times as long as reading from the
page cache.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from ctypes import Array, c_char
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from types import MappingProxyType
from typing import NamedTuple, Protocol

from meshwright.precision import dtype_bytes

Bytes = bytes | bytearray | memoryview | Array[c_char]


class Checksum(Protocol):
    """A running checksum of chunks of bytes."""

    def update(self, data: Bytes, /) -> object: ...

    def intdigest(self) -> int: ...


class _Crc32:
    def __init__(self, data: Bytes = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def algorithm(kind: str) -> Callable[[Bytes], Checksum]:
    """Return the constructor of a checksum of ``kind``, which takes the first bytes."""
    if kind == "crc32":
        return _Crc32
    import xxhash  # imported here, so that training without checkpoints does not need it

    return xxhash.xxh3_64


DIGITS: Mapping[str, int] = MappingProxyType({"xxh3": 16, "crc32": 8})
"""Hexadecimal digits of each kind."""

OF_VERSION: Mapping[int, str] = MappingProxyType({1: "crc32", 2: "xxh3"})
"""The kind of checksum of each version of the format."""

OURS = "xxh3"


DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "uint16": "U16",
        "int16": "I16",
        "float16": "F16",
        "bfloat16": "BF16",
        "uint32": "U32",
        "int32": "I32",
        "float32": "F32",
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
        "complex64": "C64",
    }
)
"""dtype name -> its name in a safetensors header."""

_MAX_HEADER_BYTES = 100_000_000  # the cap of the safetensors library
_FILE_NAME = re.compile(r"rank_[0-9]{5,9}\.safetensors")


def item_size(dtype: str) -> int:
    """The bytes of an element. Raises ``ValueError`` for a dtype that safetensors lacks."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be saved; expected one of {', '.join(DTYPES)}")
    return dtype_bytes(dtype)


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file: no folder, no other characters, bounded length."""
    return _FILE_NAME.fullmatch(name) is not None


class Entry(NamedTuple):
    """One tensor in a safetensors file: its key, dtype and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMap:
    """The layout of one file; spans are absolute byte positions, in file order."""

    header: bytes
    spans: Mapping[str, tuple[int, int]]
    size: int
    """Bytes of the file."""


def file_map(name: str, step: int, entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> FileMap:
    """Compute the header and the byte spans of the file ``name`` of a step.

    Larger elements come first, so that each tensor is aligned to its element and the file has no
    gap. The header has the step and the file's name, so files of another step or rank do not match.
    ``entries`` are key, dtype and shape, as an ``Entry`` has them.
    """
    kinds: dict[tuple[str, tuple[int, ...]], tuple[int, int, str]] = {}
    rows: list[tuple[int, str, int, str]] = []
    for key, dtype, shape in entries:
        kind = kinds.get((dtype, shape))
        if kind is None:
            size = Entry(key, dtype, shape).size
            text = f'"dtype":"{DTYPES[dtype]}","shape":[{",".join(map(str, shape))}]'
            kind = kinds[dtype, shape] = -item_size(dtype), size, text
        rows.append((kind[0], key, kind[1], kind[2]))
    rows.sort()
    spans: dict[str, tuple[int, int]] = {}
    texts = [f'{{"__metadata__":{{"format":"pt","file":{quoted(name)},"step":"{step}"}}']
    position = 0
    for _, key, size, text in rows:
        stop = position + size
        texts.append(f'{quoted(key)}:{{{text},"data_offsets":[{position},{stop}]}}')
        spans[key] = position, stop
        position = stop
    if len(spans) < len(rows) or "__metadata__" in spans:
        twice = Counter(["__metadata__", *(row[1] for row in rows)]).most_common(1)[0][0]
        raise ValueError(f"{name}: two tensors under the key {twice!r}")
    header = (",".join(texts) + "}").encode("ascii")
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER_BYTES:
        size = len(header)
        raise ValueError(f"{name}: a header of {size} bytes, the limit is {_MAX_HEADER_BYTES}")
    start = 8 + len(header)
    return FileMap(
        header=struct.pack("<Q", len(header)) + header,
        spans=MappingProxyType({key: (start + a, start + b) for key, (a, b) in spans.items()}),
        size=start + position,
    )
