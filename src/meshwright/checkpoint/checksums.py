"""Checksums of the elements of a piece, which change with a format's version.

xxh3 of 64 bits (xxHash, https://xxhash.com) runs at the speed of memory. Version 1 had crc32,
which takes three times as long as reading from the page cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol


class Checksum(Protocol):
    """The checksum of all bytes that it was given, one chunk after the other."""

    def update(self, data: memoryview, /) -> object:
        """Take more bytes in."""
        ...

    def intdigest(self) -> int:
        """Return the checksum of what it was given so far."""
        ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def _xxh3() -> Checksum:
    import xxhash  # here, so that models train where nothing is saved without it

    return xxhash.xxh3_64()


ALGORITHMS: Mapping[str, Callable[[], Checksum]] = MappingProxyType(
    {"xxh3": _xxh3, "crc32": _Crc32}
)
"""An empty checksum of each kind."""

DIGITS: Mapping[str, int] = MappingProxyType({"xxh3": 16, "crc32": 8})
"""Hexadecimal digits of each kind."""

OF_VERSION: Mapping[int, str] = MappingProxyType({1: "crc32", 2: "xxh3"})
"""The kind that each version of the format has."""

OURS = "xxh3"
