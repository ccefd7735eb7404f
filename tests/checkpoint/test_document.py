"""Sealed documents: one text for a value, and no bit of it can change unseen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.internals.checkpoint import MAX_DOCUMENT_BYTES, canonical, check_json, seal, unseal

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_back_exactly(value: Any) -> None:
    check_json(value, "value")
    sealed = seal(canonical({"value": value}))
    back = unseal(sealed)
    assert repr(back) == repr({"value": value})  # repr tells 1 from 1.0 and 0.0 from -0.0
    assert seal(canonical(back)) == sealed
    assert json.loads(sealed)["manifest"] == {"value": value}


def test_the_order_of_keys_is_kept() -> None:
    body = {"b": 1, "a": {"z": 1, "y": 2}}
    assert canonical(unseal(seal(canonical(body)))) == b'{"b":1,"a":{"z":1,"y":2}}'


def test_every_flipped_bit_and_every_length_is_refused() -> None:
    sealed = seal(canonical({"a": [1, 2.5, None], "b": "text"}))
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"."):
            unseal(bytes(changed))
    for size in range(len(sealed)):
        with pytest.raises(ValueError, match=r"."):
            unseal(sealed[:size])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": (1,)}}, r"m\.a\.b: expected None.*found tuple"),
        ({"a": [0, {1: 2}]}, r"m\.a\[1\]: key 1 is not a string"),
        ({"a": float("inf")}, r"m\.a: inf is not a JSON number"),
        ({"a": 1 << 8193}, r"m\.a: an integer of more than 8192 bits"),
        ({"a": {1, 2}}, r"m\.a: .*found set"),
        ({"a": b""}, r"m\.a: .*found bytes"),
    ],
)
def test_what_json_would_change_is_refused(value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_json(value, "m")


def test_endless_values_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        check_json(endless, "m")


def test_a_document_above_the_cap_is_refused() -> None:
    large = "x" * MAX_DOCUMENT_BYTES
    with pytest.raises(ValueError, match=r"limit is \d+; save large metadata as tensors"):
        seal(large.encode())
    with pytest.raises(ValueError, match="bytes, the limit is"):
        unseal(large.encode() + b"x")
