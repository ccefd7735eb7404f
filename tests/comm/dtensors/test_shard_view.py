"""A ShardView where users of sharded state look at it: compared, saved, copied, staged."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.internals.comm import ShardView

SHAPE = (3, 4)


def whole() -> torch.Tensor:
    return torch.arange(12.0).view(SHAPE)


def view(values: torch.Tensor | None = None, start: int = 3, stop: int = 9) -> ShardView:
    values = whole() if values is None else values
    return ShardView(values.flatten()[start:stop].clone(), start, SHAPE, name="w")


def test_equal_elements_are_equal_and_close() -> None:
    own = view()
    for other in (view(), whole()):
        assert torch.equal(own, other)
        assert torch.equal(other, own)
        assert torch.allclose(own, other)
        assert own.allclose(other)
        torch.testing.assert_close(own, other, rtol=0, atol=0)
        torch.testing.assert_close(other, own)
    # Elements of other ranks are not looked at.
    elsewhere = whole()
    elsewhere[0, 0] = elsewhere[2, 3] = 77.0
    assert torch.equal(own, elsewhere)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_other_elements_are_reported(dtype: torch.dtype) -> None:
    changed = whole().to(dtype)
    changed[1, 1] += 2
    own, other = view(whole().to(dtype)), view(changed)
    assert not torch.equal(own, other)
    assert not torch.allclose(own, changed)
    assert torch.isclose(own, other).tolist() == [True, True, False, True, True, True]
    with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 6[\s\S]*difference: 2"):
        torch.testing.assert_close(own, other)
    with pytest.raises(AssertionError, match="The values for attribute 'shape' do not match"):
        torch.testing.assert_close(own, changed[:2])


def test_other_ranges_are_not_compared() -> None:
    with pytest.raises(ValueError, match="holds elements 3 to 9, the other 0 to 4"):
        torch.equal(view(), view(start=0, stop=4))
    with pytest.raises(ValueError, match="expected another tensor of the same shape"):
        torch.allclose(view(), whole()[:2])
    with pytest.raises(RuntimeError, match="cannot be computed on it"):
        view().flatten()


def test_files_hold_its_own_elements_and_are_read_without_code() -> None:
    line = torch.zeros(100_000)
    own = ShardView(line[3:9], 3, SHAPE, name="w")
    file = io.BytesIO()
    torch.save({"w": own, "same": [own]}, file)
    assert file.tell() < 10_000
    file.seek(0)
    found = torch.load(file, weights_only=True)["w"]
    assert isinstance(found, ShardView)
    assert (found.start, found.shape, found.name) == (3, SHAPE, "w")
    torch.testing.assert_close(found, own)


def test_new_tensors() -> None:
    made = view().new_empty(SHAPE, dtype=torch.float64)
    assert isinstance(made, ShardView)
    assert (made.start, made.stop, made.dtype, made.local.dtype) == (3, 9, *[torch.float64] * 2)
    assert type(view().new_zeros(2, 2)) is torch.Tensor
    assert torch.equal(view().new_zeros(SHAPE), view(torch.zeros(SHAPE)))


def test_local_shards_are_the_boxes() -> None:
    own = view()
    found = own.local_shards()
    assert [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in found] == [
        ([0, 3], [1, 1]),
        ([1, 0], [1, 4]),
        ([2, 0], [1, 1]),
    ]
    found[1].tensor.fill_(5.0)
    assert own.local.tolist() == [3.0, 5.0, 5.0, 5.0, 5.0, 8.0]


def body_staged(folder: Path) -> None:
    """Saved in the background while training goes on."""
    world = communicator()
    parts = torch.arange(12.0).chunk(world.size)
    start = sum(len(part) for part in parts[: world.rank])
    own = ShardView(parts[world.rank].clone(), start, SHAPE, name="w", communicator=world)
    assert copy.deepcopy({"w": own})["w"].communicator is world
    future: Any = dcp.async_save({"w": own, "n": 3}, checkpoint_id=folder)
    own.local.fill_(-1.0)
    future = getattr(future, "upload_completion", future)
    future.result()
    state = {"w": own, "n": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["n"] == 3
    assert torch.equal(own.full_tensor(), whole())


@pytest.mark.backends("gloo")
def test_it_is_saved_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_staged, tmp_path)
