"""`flat_groups` of parameters that no unit manages: updates as those of each parameter alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import clip_grad_norm_, comm, parallelize_module, replicate
from meshwright.data_parallel import flat_groups
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks
from support.internals.comm import local_of

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Net(nn.Sequential):
    """Two layers that are cut, one that is not, and parameters unused, tied and frozen."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 6))
        self.double()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.tied = self[3].weight
        self[3].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, is_short: bool = False) -> torch.Tensor:
        """Of shape (batch, 6)."""
        x = self[2](self[1](self[0](x)))
        return x if is_short else self[3](x)


def train(one: nn.Module, many: nn.Module, flats: list[nn.Parameter], share: slice) -> None:
    """Five steps of both, one with their parameters and one with its flat ones."""
    each, flat = (torch.optim.AdamW(p, lr=0.02) for p in (one.parameters(), flats))
    one.unused.grad = torch.zeros_like(one.unused)  # what flat parameters take it for
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        for number in range(1 + step % 2):
            x = torch.randn(4, 6, generator=generator).double()
            is_short = step == 3 and number == 0
            one(x, is_short=is_short).square().mean().backward()
            many(x[share], is_short=is_short).square().mean().backward()
        norms = [
            clip_grad_norm_(list(one.parameters()), 0.3),
            clip_grad_norm_(flats if step % 2 else list(many.parameters()), 0.3),
        ]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=1e-14)
        each.step()
        flat.step()
        for expected, found in zip(one.parameters(), many.parameters(), strict=True):
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-14)
        (flat if step % 3 else many).zero_grad(set_to_none=step != 2)
        one.zero_grad(set_to_none=False)
        left = [p.grad for p in flats]
        assert (
            left == [None] * len(flats)
            if step != 2
            else not any(g.as_subclass(torch.Tensor).any() for g in left)
        )


def test_long_parameters_stand_alone_and_keep_their_gradients() -> None:
    """Whatever the order of their elements in memory is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 600, 40), nn.Linear(2, 3))
    model = model.to(memory_format=torch.channels_last)
    one = copy.deepcopy(model)
    large, small = flats = flat_groups(model)
    weight = model[1].weight
    assert (large.numel(), small.numel()) == (weight.numel(), 3 * 4 * 9 + 4 + 600 + 6 + 3)
    each, flat = (torch.optim.AdamW(p, lr=0.1) for p in (one.parameters(), flats))
    for _ in range(2):
        for found in (model, one):
            generator = torch.Generator().manual_seed(1)
            found.zero_grad()
            for parameter in found.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                parameter.grad = torch.empty_like(parameter).copy_(values)
        memory = weight.grad.data_ptr() if weight.grad is not None else 0
        flat.step()
        each.step()
        assert weight.grad is not None and large.grad is not None
        assert weight.grad.data_ptr() == large.grad.data_ptr() == memory
    for expected, found in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_plain_parameters_of_one_process() -> None:
    one = Net()
    many = copy.deepcopy(one)
    before = {name: value.clone() for name, value in many.state_dict().items()}
    (flat,) = flats = flat_groups(many)
    assert flat.shape == (8 * 6 + 8 + 6 * 8 + 6 + 36 + 3,)
    assert flat_groups(many)[0] is flat
    found = many.state_dict()
    assert list(found) == list(before)
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert copy.deepcopy(many)[0].weight.data_ptr() != many[0].weight.data_ptr()
    train(one, many, flats, slice(None))
    many[0].weight.grad = torch.ones_like(many[0].weight)
    assert flat.grad is not None
    assert flat.grad.sum() == 48
    assert flat.grad.data_ptr() == flat.grad.data_ptr()
    flat.grad = flat.grad.clamp_(0.0, 0.5)  # the memory that it is
    assert flat.grad.sum() == 24

    late = many(torch.ones(1, 6).double()).sum()
    torch.optim.SGD(flats).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    with pytest.raises(TypeError, match="copy the model"):
        copy.deepcopy(flat)
    many[0].weight.data = many[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"'0.weight' of shape \(8, 6\) lies in other memory"):
        torch.optim.SGD(flats).step()
    (other,) = flat_groups(many)
    assert other is not flat
    lookup = nn.Embedding(3, 2, sparse=True)
    (flat,) = flat_groups(lookup)
    lookup(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="'weight' has a sparse gradient"):
        torch.optim.SGD([flat]).step()
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        flat_groups(nn.Linear(2, 2, device="meta"))


def body_over_axes(tensor: int) -> None:
    world = comm.communicator()
    data = world.size // tensor
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("replicate", "tensor"))
    one = Net()
    for after in (False, True):
        here = copy.deepcopy(one)
        many = copy.deepcopy(one)
        if tensor > 1:
            parallelize_module(many, mesh["tensor"], PLAN)
        flats = flat_groups(many) if not after else []
        before = [local_of(p)._version for p in many.parameters() if p.requires_grad]
        if data > 1:
            replicate(many, device_mesh=mesh["replicate"])
        flats = flats or flat_groups(many)
        cut = (8 * 6 + 8 + 6 * 8) // tensor
        expected = [cut, 6 + 36 + 3] if tensor > 1 else [cut + 6 + 36 + 3]
        assert sorted(len(flat) for flat in flats) == sorted(expected)
        rows = 4 // data
        first = mesh["replicate"].get_local_rank() * rows
        train(here, many, flats, slice(first, first + rows))
        changed = [local_of(p)._version for p in many.parameters() if p.requires_grad]
        assert all(now >= then + 5 for now, then in zip(changed, before, strict=True))
        memory = [flat.untyped_storage().data_ptr() for flat in flats]
        assert local_of(many[0].weight).untyped_storage().data_ptr() in memory


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (2, 1)])
def test_two_ranks(ranks: Ranks, size: int, tensor: int) -> None:
    ranks(size, body_over_axes, tensor)


@pytest.mark.slow
def test_replicas_of_parts(ranks: Ranks) -> None:
    ranks(4, body_over_axes, 2)
