"""Writes to parts of DTensors, which change these as they would a plain tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright import fully_shard
from meshwright.errors import LayoutError
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import side_by_side, write_through


def chained(t: torch.Tensor) -> None:
    rows = t[1:4]
    rows[0].mul_(3)
    rows[:, 1:][:2].fill_(7)
    rows.add_(1)


def two_parts(t: torch.Tensor) -> None:
    torch._foreach_mul_([t[0], t[2]], 3.0)


def between(t: torch.Tensor) -> None:
    t[0].zero_()
    t.mul_(2)
    t[0].add_(1)


def assigned(t: torch.Tensor) -> None:
    t[1] = 5
    t[:, 0] = 6
    t[3, 1:] = 7
    t[2] = t[0]


def drawn(t: torch.Tensor) -> None:
    torch.manual_seed(3)
    t[:3].normal_()
    t[:, 1:].uniform_()


WRITES: dict[str, Callable[[Any], object]] = {
    "row": lambda t: t[0].zero_(),
    "last rows": lambda t: t[-2:].fill_(2),
    "column": lambda t: t[:, 1].mul_(2),
    "rows that skip": lambda t: t[::2].neg_(),
    "narrow": lambda t: t.narrow(0, 1, 2).add_(t.narrow(0, 3, 2)),
    "split": lambda t: [each.fill_(n) for n, each in enumerate(t.split(2))],
    "chunk": lambda t: t.chunk(3, dim=1)[1].zero_(),
    "sizes": lambda t: t.split([1, 3, len(t) - 4])[1].sub_(1),
    "diagonal": lambda t: t.diagonal().fill_(9),
    "transposed": lambda t: t.t()[1].zero_(),
    "data": lambda t: t.data[0].zero_(),
    "detached": lambda t: t.detach()[2].zero_(),
    "out": lambda t: torch.add(t[0].clone(), 1.0, out=t[1]),
    "other type": lambda t: t[:2].view(torch.int64).zero_(),
    "chained": chained,
    "two parts": two_parts,
    "between": between,
    "assigned": assigned,
    "drawn": drawn,
}


def body() -> None:
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    for placement, rows in (
        (Shard(0), 5),
        (Shard(1), 5),
        (Replicate(), 5),
        (side_by_side(0, 2), 8),
    ):
        values = torch.arange(rows * 3.0, dtype=torch.float64).view(rows, 3)
        for name, write in WRITES.items():
            one, spread = values.clone(), distribute_tensor(values, mesh, [placement])
            for tensor in (one, spread):
                write(tensor)
            found = spread.full_tensor()
            torch.testing.assert_close(found, one, rtol=0, atol=0, msg=f"{name}, {placement}")


def test_writes_to_parts_change_the_whole(ranks: Ranks) -> None:
    ranks(2, body)


def body_of_axes() -> None:
    write_through()
    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(35.0).view(7, 5)
    for placements in ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1))):
        one, spread = values.clone(), distribute_tensor(values, mesh, placements)
        for tensor in (one, spread):
            tensor[1:4].mul_(2)
            tensor[:, 2].zero_()
            tensor[5, 1:3].fill_(1)
        assert torch.equal(spread.full_tensor(), one), placements


def test_writes_to_parts_of_what_several_axes_cut(ranks: Ranks) -> None:
    ranks(4, body_of_axes)


def body_of_gradients() -> None:
    """A part that is written to in a forward, as one process computes it."""
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(12.0).view(4, 3)
    found = []
    for weight in (values.clone(), distribute_tensor(values, mesh, [Shard(0)])):
        weight.requires_grad_()
        out = weight * weight
        out[1:3].mul_(2)
        out[:, 0] = out[:, 1] * 3
        (out * out).sum().backward()
        assert weight.grad is not None
        found += [out.detach(), weight.grad]
    assert isinstance(found[2], DTensor) and isinstance(found[3], DTensor)
    torch.testing.assert_close(found[2].full_tensor(), found[0])
    torch.testing.assert_close(found[3].full_tensor(), found[1])


def test_written_parts_have_the_gradients_of_one_process(ranks: Ranks) -> None:
    ranks(2, body_of_gradients)


def body_of_memory() -> None:
    """A part keeps nothing of the graph of what it was taken of."""
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_() * 2
    kept, seen = whole[0].detach(), weakref.ref(whole)
    changed = whole * 2
    changed[1:3].exp_()
    also_seen = weakref.ref(changed)
    del whole, changed
    gc.collect()
    assert seen() is None and also_seen() is None
    assert kept.full_tensor().tolist() == [2, 2, 2]


def test_parts_keep_no_graph(ranks: Ranks) -> None:
    ranks(2, body_of_memory)


def body_of_refusals() -> None:
    write_through()
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    row = tensor[0]
    tensor.mul_(2)
    with pytest.raises(RuntimeError, match=r"a part that is not older than its DTensor of shape"):
        row.zero_()
    assert torch.equal(tensor.full_tensor(), torch.full((4, 3), 2.0))
    summand = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
    with pytest.raises(LayoutError, match="took a part that is written to' is placed"):
        summand.diagonal().fill_(3)
    compiled = torch.compile(lambda t: t[0].zero_(), backend="eager")
    with pytest.raises(RuntimeError, match="a compiled function writes to a part"):
        compiled(tensor)


def test_parts_older_than_the_last_write_are_refused(ranks: Ranks) -> None:
    ranks(2, body_of_refusals)


def body_of_models() -> None:
    """Layers that are initialized after sharding, with rows that are not drawn."""
    found = []
    for is_sharded in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(10, 4, padding_idx=3), nn.Linear(4, 5))
        if is_sharded:
            fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in model:
            layer.reset_parameters()
        found.append(
            [
                value.full_tensor() if isinstance(value, DTensor) else value
                for value in model.state_dict().values()
            ]
        )
    for one, sharded in zip(*found, strict=True):
        torch.testing.assert_close(sharded, one, rtol=0, atol=0)
    assert not found[1][0][3].any()


def test_padding_rows_are_zero_in_models_initialized_after_sharding(ranks: Ranks) -> None:
    ranks(2, body_of_models)
