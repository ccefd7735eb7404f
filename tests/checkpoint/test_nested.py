"""Nested state comes back exactly: types, order, bits of floats, and tensors."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import ShardedPiece, flatten, load_tensors, save_tensors, unflatten
from support.internals.checkpoint import canonical, check_json, seal, unseal
from support.internals.layout import Box

KEYS = (
    st.text()
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.tuples(st.integers(), st.text())
    | st.just("$tensor")
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(lambda n: torch.tensor(n, dtype=torch.int64), st.integers(-(2**63), 2**63 - 1))
    | st.builds(lambda values: torch.tensor(values), st.lists(st.floats(width=32), max_size=3))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, down to the last tensor; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a.hex() == b.hex())
    return bool(a == b)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_state_comes_back_exactly(value: Any) -> None:
    tensors, structure = flatten(value, "state")
    check_json(structure, "structure")
    back = unseal(seal(canonical({"structure": structure})))
    assert isinstance(back, dict)
    assert all(name.startswith("state") for name in tensors)
    assert same(unflatten(back["structure"], tensors), value)


def test_through_a_checkpoint(tmp_path: Path) -> None:
    value = {
        "state": {"layer.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(4)}},
        "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "params": ["a"]}],
        "random": random.Random(1).getstate(),
        "torch_rng": torch.get_rng_state(),
        "best": float("inf"),
        3: {"x": -0.0},
    }
    tensors, structure = flatten(value, "optimizer")
    assert "optimizer/state/layer.weight/exp_avg" in tensors
    found = load_tensors(save_tensors(tmp_path, tensors, {"optimizer": structure}, step=0))
    assert same(unflatten(found.metadata["optimizer"], found.tensors), value)


def test_the_text_form() -> None:
    tensors, structure = flatten({"a": {1: (2, torch.ones(1))}, "b": [float("-inf")]}, "s")
    assert list(tensors) == ["s/a/1/1"]
    assert structure == {
        "a": {"$dict": [[1, {"$tuple": [2, {"$tensor": "s/a/1/1"}]}]]},
        "b": [{"$float": "-inf"}],
    }


def test_names_that_would_collide_stay_apart() -> None:
    value = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 1: torch.tensor(3)}
    value["1"] = torch.tensor(4)
    tensors, structure = flatten(value, "s")
    assert len(tensors) == 4
    assert same(unflatten(structure, tensors), value)


def test_a_sharded_piece_is_a_leaf() -> None:
    piece = ShardedPiece(global_shape=(4,), boxes=(Box((0,), (2,)),), tensor=torch.ones(2))
    tensors, structure = flatten({"w": piece}, "s")
    assert tensors == {"s/w": piece}
    assert unflatten(structure, tensors) == {"w": piece}


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [{1, 2}, Color.RED, object(), 1j, len, torch.float32, {"a": [range(3)]}, {torch.ones(1): 1}],
)
def test_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be"):
        flatten(value, "s")


def test_endless_state_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested deeper"):
        flatten(endless, "s")


def test_the_deepest_state_fits_a_document() -> None:
    value: object = 1
    for _ in range(32):
        value = {0: value}
    _, structure = flatten(value, "s")
    check_json({"structure": structure}, "metadata")
    with pytest.raises(ValueError, match="nested deeper"):
        flatten({0: value}, "s")


@pytest.mark.parametrize(
    "text",
    [
        b'{"$tensor":"lost"}',
        b'{"$tensor":1}',
        b'{"$tensor":"t","more":1}',
        b'{"$other":1}',
        b'{"$float":"1.5"}',
        b'{"$bytes":"0"}',
        b'{"$tuple":{}}',
        b'{"$dict":[[1]]}',
        b'{"$dict":[[[1],2]]}',
    ],
)
def test_malformed_state_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"malformed|not there|hexadecimal"):
        unflatten(json.loads(text), {"t": torch.ones(1)})
