"""Nested Python state as named tensors and JSON, and back exactly.

A checkpoint has tensors by name and JSON, no code. ``flatten`` takes the tensors out of nested
state and encodes the rest; what JSON cannot express is marked by a key beginning with ``$``::

    tensor            {"$tensor": "optimizer/state/weight/exp_avg"}
    (0.9, 0.999)      {"$tuple": [0.9, 0.999]}
    {0: "a"}          {"$dict": [[0, "a"]]}          keys that are not strings, or begin with $
    OrderedDict(...)  {"$ordered": [["a", 1]]}
    Counter(...)      {"$counter": [[30, 1]]}        a scheduler's milestones
    inf, -inf, nan    {"$float": "inf"}
    b"\\x00"           {"$bytes": "00"}
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import Tensor

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.pieces import ShardedPiece

_DICTS: Mapping[type, str] = MappingProxyType(
    {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
)
_MAX_DEPTH = 32  # a marked level takes up to three of the 100 levels of JSON


def flatten(value: object, prefix: str) -> tuple[dict[str, Tensor | ShardedPiece], JSON]:
    """Return the tensors of nested state, by names that begin with ``prefix``; the rest as JSON.

    Takes None, bool, int, float, str, bytes, tensors, ``ShardedPiece``, and lists, tuples, dicts,
    OrderedDicts and Counters of these. Raises ``TypeError`` naming the place of anything else,
    including subclasses (an ``IntEnum``), which would be restored as another type.
    """
    tensors: dict[str, Tensor | ShardedPiece] = {}
    return tensors, _encode(value, prefix, tensors, 0)


def unflatten(structure: JSON, tensors: Mapping[str, Tensor | ShardedPiece]) -> object:
    """Rebuild the state from the results of ``flatten``.

    Raises ``ValueError`` when the structure is malformed or names a tensor that is not there.
    """
    if isinstance(structure, list):
        return [unflatten(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    marks = [key for key in structure if key.startswith("$")]
    if not marks:
        return {key: unflatten(item, tensors) for key, item in structure.items()}
    if len(structure) != 1:
        raise ValueError(f"malformed state: the mark {marks[0]!r} among {len(structure)} keys")
    return _decode(marks[0], structure[marks[0]], tensors)


def _encode(
    value: object, place: str, tensors: dict[str, Tensor | ShardedPiece], depth: int
) -> JSON:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{place}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Tensor | ShardedPiece):
        name = place
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    kind = type(value)
    if value is None or (isinstance(value, bool | int | str) and kind in (bool, int, str)):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": value.hex()}
    if isinstance(value, list) and kind is list:
        return _encode_items(value, place, tensors, depth)
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": _encode_items(value, place, tensors, depth)}
    if isinstance(value, dict) and kind in _DICTS:
        return _encode_dict(value, place, tensors, depth)
    raise TypeError(
        f"{place}: a {kind.__module__}.{kind.__qualname__} cannot be saved; expected None, bool,"
        " int, float, str, bytes, a tensor, list, tuple or dict"
    )


def _encode_items(
    items: Iterable[object], place: str, tensors: dict[str, Tensor | ShardedPiece], depth: int
) -> list[JSON]:
    return [
        _encode(item, f"{place}/{index}", tensors, depth + 1) for index, item in enumerate(items)
    ]


def _encode_dict(
    value: dict[object, object], place: str, tensors: dict[str, Tensor | ShardedPiece], depth: int
) -> JSON:
    plain: dict[str, JSON] = {}
    pairs: list[JSON] = []
    is_plain = type(value) is dict
    for key, item in value.items():
        if isinstance(key, Tensor):
            raise TypeError(f"{place}: a tensor cannot be the key of a saved dict")
        encoded_key = _encode(key, f"{place}, key {key!r}"[:300], tensors, depth + 1)
        encoded = _encode(item, f"{place}/{key}", tensors, depth + 1)
        is_plain = is_plain and isinstance(key, str) and not key.startswith("$")
        plain[str(key)] = encoded
        pairs.append([encoded_key, encoded])
    if is_plain:
        return plain
    return {_DICTS[type(value)]: pairs}


def _decode(mark: str, content: JSON, tensors: Mapping[str, Tensor | ShardedPiece]) -> object:
    match mark, content:
        case "$tensor", str():
            if content not in tensors:
                raise ValueError(f"the state names a tensor {content!r} that is not there")
            return tensors[content]
        case "$tuple", list():
            return tuple(unflatten(item, tensors) for item in content)
        case "$dict", list():
            return dict(_pairs(content, tensors))
        case "$ordered", list():
            return OrderedDict(_pairs(content, tensors))
        case "$counter", list():
            return Counter(dict(_pairs(content, tensors)))
        case "$float", "inf" | "-inf" | "nan":
            return float(content)
        case "$bytes", str():
            return bytes.fromhex(content)
    raise ValueError(f"malformed state: {mark!r} with {str(content)[:60]}")


def _pairs(
    content: list[JSON], tensors: Mapping[str, Tensor | ShardedPiece]
) -> list[tuple[object, object]]:
    pairs: list[tuple[object, object]] = []
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"malformed state: expected a key and a value, found {str(pair)[:60]}")
        key = unflatten(pair[0], tensors)
        try:
            hash(key)
        except TypeError:
            raise ValueError(f"malformed state: {str(key)[:60]} cannot be a key") from None
        pairs.append((key, unflatten(pair[1], tensors)))
    return pairs
