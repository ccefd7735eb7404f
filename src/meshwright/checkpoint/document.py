"""Sealed JSON documents: one canonical text for a value, and a checksum inside the same file.

::

    {"manifest":<canonical JSON of the body>,
    "crc32":"89abcdef"}

The file is JSON that any tool can read. Its checksum covers the bytes between two fixed frames, so
every bit of the file is either compared with a frame or checked. The checksum is verified before
the JSON parser sees a byte. There is exactly one text for a value: no blanks, ASCII only, keys in
the order of insertion; repeated keys, odd forms of numbers and stray blanks are refused.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

MAX_DOCUMENT_BYTES = 64 * 2**20
"""Size cap of a sealed document: parsing one takes bounded memory and time."""

_MAX_DEPTH = 100
_HEAD = b'{"manifest":'
_TAIL = re.compile(rb',\n"crc32":"([0-9a-f]{8})"\}\n')
_TAIL_BYTES = len(b',\n"crc32":"00000000"}\n')
_HEXADECIMAL = frozenset("0123456789abcdef")
_ABSENT = object()
_T = TypeVar("_T")


def check_json(value: object, where: str, depth: int = 0) -> None:
    """Refuse what JSON would not give back as it was: tuples, NaN, keys that are no strings.

    Raises ``TypeError`` or ``ValueError`` naming the place, e.g. ``metadata.sampler.position``.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
    if type(value) is int:
        if abs(value) >> 8192:
            raise ValueError(f"{where}: an integer of more than 8192 bits")
    elif type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a JSON number; `flatten` encodes it")
    elif type(value) is list:
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(
                    f"{where}: key {key!r} is not a string; `flatten` encodes such keys"
                )
            check_json(item, f"{where}.{key}", depth + 1)
    elif value is not None and type(value) not in (bool, str):
        raise TypeError(
            f"{where}: expected None, bool, int, float, str, list or dict, found "
            f"{type(value).__name__}; `flatten` encodes tuples and tensors"
        )


def canonical(value: JSON | Mapping[str, JSON]) -> bytes:
    """Write the one text of a JSON value."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def parse_canonical(text: bytes) -> JSON:
    """Parse a canonical text. Raises ``ValueError`` for any other text, however deep or large."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(text)} bytes, the limit is {MAX_DOCUMENT_BYTES}")
    try:
        value: JSON = json.loads(text.decode("ascii"))
        again = canonical(value)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not ASCII") from None
    if again != text:
        raise ValueError("not canonical JSON (repeated keys, blanks or another form of a number)")
    return value


def seal(body: Mapping[str, JSON]) -> bytes:
    """Write the file for ``body``, with its checksum."""
    text = canonical(body)
    sealed = _HEAD + text + b',\n"crc32":"%08x"}\n' % zlib.crc32(text)
    if len(sealed) > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"the manifest would take {len(sealed)} bytes, the limit is {MAX_DOCUMENT_BYTES};"
            " save large metadata as tensors"
        )
    return sealed


def unseal(data: bytes) -> JSON:
    """Read the body of a sealed file. Raises ``ValueError`` if any bit is not as it was sealed."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_DOCUMENT_BYTES}")
    if not data.startswith(_HEAD):
        raise ValueError("it does not start as a manifest does")
    end = len(data) - _TAIL_BYTES
    tail = _TAIL.fullmatch(data, max(end, 0))
    if end < len(_HEAD) or tail is None:
        raise ValueError("its checksum is missing or cut off")
    text = data[len(_HEAD) : end]
    found = b"%08x" % zlib.crc32(text)
    if found != tail.group(1):
        raise ValueError(f"its checksum is {found.decode()}, expected {tail.group(1).decode()}")
    return parse_canonical(text)


class Fields:
    """The fields of a JSON object, taken one by one with their types; ``end`` refuses the rest."""

    def __init__(self, value: JSON, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, found {type(value).__name__}")
        self._value = value
        self._taken: list[str] = []
        self._where = where

    def _take(self, key: str, kind: type[_T], expected: str) -> _T:
        value = self._value.get(key, _ABSENT)
        if not isinstance(value, kind):
            if value is _ABSENT:
                raise ValueError(f"{self._where}: {key!r} is missing")
            raise self._wrong(key, expected, value)
        self._taken.append(key)
        return value

    def _wrong(self, key: str, expected: str, value: object) -> ValueError:
        return ValueError(f"{self._where}: {key!r} must be {expected}, found {str(value)[:60]!r}")

    def text(self, key: str) -> str:
        """Take a string."""
        return self._take(key, str, "a string")

    def count(self, key: str) -> int:
        """Take an integer from 0 to 2**63 - 1."""
        expected = "an integer from 0 to 2**63 - 1"
        value = self._take(key, int, expected)
        if not _is_count(value):
            raise self._wrong(key, expected, value)
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """Take a list of at most 64 integers from 0 to 2**63 - 1."""
        expected = "a list of at most 64 integers from 0 to 2**63 - 1"
        value = self._take(key, list, expected)
        if len(value) > 64 or not all(map(_is_count, value)):
            raise self._wrong(key, expected, value)
        return tuple(value)

    def checksum(self, key: str, digits: int) -> int:
        """Take a checksum of so many hexadecimal digits."""
        value = self.text(key)
        if len(value) != digits or not _HEXADECIMAL.issuperset(value):
            raise self._wrong(key, f"{digits} hexadecimal digits", value)
        return int(value, 16)

    def items(self, key: str) -> list[JSON]:
        """Take a list."""
        return self._take(key, list, "a list")

    def mapping(self, key: str) -> dict[str, JSON]:
        """Take an object."""
        return self._take(key, dict, "an object")

    def end(self) -> None:
        """Refuse fields that nobody took."""
        if len(self._taken) != len(self._value):
            rest = self._value.keys() - set(self._taken)
            raise ValueError(f"{self._where}: unknown field {min(rest)!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
