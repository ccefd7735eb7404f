"""Checksums of the elements of a piece, whose kind depends on the format's version.

xxh3 of 64 bits (xxHash, https://xxhash.com) runs at the speed of memory. Version 1 had crc32,
which takes three times as long as reading from the page cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from ctypes import Array, c_char
from types import MappingProxyType
from typing import Protocol

Bytes = bytes | bytearray | memoryview | Array[c_char]


class Checksum(Protocol):
    """A running checksum of chunks of bytes."""

    def update(self, data: Bytes, /) -> object:
        """Add more bytes."""
        ...

    def intdigest(self) -> int:
        """Return the checksum of all bytes so far."""
        ...


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
