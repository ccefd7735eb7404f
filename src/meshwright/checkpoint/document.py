"""Sealed JSON documents: one canonical text for a value, and a checksum inside the same file.

::

    {"manifest":<canonical JSON of the body>,
    "crc32":"89abcdef"}

The file is JSON that any tool can read. Its checksum covers the bytes between two fixed frames, so
every bit of the file is either compared with a frame or checked. The checksum is verified before
the JSON parser sees a byte. There is exactly one text for a value: no blanks, ASCII only, keys in
the order of insertion. A reader that writes the parsed value again, and compares, rejects repeated
keys, odd forms of numbers and stray blanks.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import TypeAlias

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

MAX_DOCUMENT_BYTES = 64 * 2**20
"""Size cap of a sealed document: parsing one takes bounded memory and time."""

_MAX_DEPTH = 100
_HEAD = b'{"manifest":'
_TAIL = re.compile(rb',\n"crc32":"([0-9a-f]{8})"\}\n')
_TAIL_BYTES = len(b',\n"crc32":"00000000"}\n')


def check_json(value: object, where: str, depth: int = 0) -> None:
    """Reject values that JSON does not round-trip: tuples, NaN, keys that are not strings.

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
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def seal(text: bytes) -> bytes:
    """Return the contents of the file for a canonical text, with its checksum."""
    sealed = _HEAD + text + b',\n"crc32":"%08x"}\n' % zlib.crc32(text)
    if len(sealed) > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"the manifest would take {len(sealed)} bytes, the limit is {MAX_DOCUMENT_BYTES};"
            " save large metadata as tensors"
        )
    return sealed


def unseal(data: bytes) -> JSON:
    """Parse the body of a sealed file. Raises ``ValueError`` if any bit is not as it was sealed.

    The text is not checked to be canonical.
    """
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
    try:
        return json.loads(text.decode("ascii"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not ASCII") from None
