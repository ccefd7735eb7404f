"""The bytes of one safetensors file as a pure function of what it holds.

::

    | 8 bytes: length n | n bytes: JSON header, padded with blanks | tensors, no gaps |

The writer and the reader call the same function: a reader that knows from the manifest which
tensors a file holds knows its header to the last byte, compares, and never has to parse one.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.precision import dtype_bytes

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
    """Count the bytes of an element. Raises ``ValueError`` for a dtype safetensors cannot hold."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be saved; expected one of {', '.join(DTYPES)}")
    return dtype_bytes(dtype)


def file_name(rank: int) -> str:
    """Find the file that ``rank`` writes."""
    return f"rank_{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Check that a manifest may name this file: no folder, no other characters, bounded length."""
    return _FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMap:
    """The places of all that lies in one file; spans are absolute byte positions, in file order."""

    header: bytes
    spans: Mapping[str, tuple[int, int]]
    size: int
    """Bytes of the whole file."""


def file_map(name: str, step: int, entries: Iterable[Entry]) -> FileMap:
    """Find the header and the byte spans of the file ``name`` of a step.

    Larger elements come first, so that each tensor is aligned to its element and the file has no
    gap. The header holds the step and the file's name: files of another step or rank do not fit.
    """
    ordered = sorted(entries, key=lambda entry: (-item_size(entry.dtype), entry.key))
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "file": name, "step": str(step)},
    }
    offsets: dict[str, tuple[int, int]] = {}
    position = 0
    for entry in ordered:
        if entry.key in header:
            raise ValueError(f"{name}: two tensors under the key {entry.key!r}")
        stop = position + entry.size
        header[entry.key] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, stop],
        }
        offsets[entry.key] = (position, stop)
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"{name}: a header of {len(text)} bytes, the limit is {_MAX_HEADER_BYTES}")
    start = 8 + len(text)
    return FileMap(
        header=struct.pack("<Q", len(text)) + text,
        spans=MappingProxyType({key: (start + a, start + b) for key, (a, b) in offsets.items()}),
        size=start + position,
    )
