"""Hooks that users put on sharded parameters: what they do is what they do in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import DistributedDataParallel, flat_groups, fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.testing import Ranks


class Net(nn.Module):
    """Two layers of their own units, one weight that both units use, one parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()


def backward(one: nn.Module, many: nn.Module, step: int) -> None:
    world = communicator()
    one(batch(step)).square().mean().backward()
    many(batch(step).chunk(world.size)[world.rank]).square().mean().backward()


def assert_equal(one: nn.Module, many: nn.Module) -> None:
    for (name, expected), found in zip(one.named_parameters(), many.parameters(), strict=True):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-14, msg=name)


def unit_norm(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm()


def in_place(gradient: torch.Tensor) -> None:
    gradient.mul_(3)


def shard(net: Net) -> Net:
    fully_shard(net.a)
    fully_shard(net.b)
    return fully_shard(net)


def body_gradient_hooks() -> None:
    """Before and after the model is sharded, on a shared weight too, until they are removed."""
    one = Net()
    many = copy.deepcopy(one)
    handles = [p.register_hook(unit_norm) for net in (one, many) for p in (net.a.weight,)]
    shard(many)
    handles += [p.register_hook(in_place) for net in (one, many) for p in net.c.parameters()]
    mine, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, many))
    for step in range(4):
        if step == 3:
            for handle in handles:
                handle.remove()
        backward(one, many, step)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(one, many)
    many.c.weight.register_hook(lambda g: g + torch.ones(1, 5).double())
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
        backward(one, many, 5)
    assert "a hook of parameter 'c.weight', which is sharded" in caught.value.__notes__[0]


def body_flat_view() -> None:
    """The flat view of the parameters has what hooks have made of their gradients."""
    one = Net()
    many = shard(copy.deepcopy(one))
    for net in (one, many):
        net.c.weight.register_hook(lambda gradient: gradient * 2)
    mine = torch.optim.SGD(one.parameters(), lr=0.1)
    theirs = torch.optim.SGD(flat_groups(many), lr=0.1)
    for step in range(3):
        backward(one, many, 2 * step)
        backward(one, many, 2 * step + 1)
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        assert_equal(one, many)


def test_hooks_on_gradients_get_the_mean(ranks: Ranks) -> None:
    ranks(2, body_gradient_hooks)
    ranks(2, body_flat_view)


def body_optimizer_in_backward(strategy: str) -> None:
    one = Net()
    many: Any = copy.deepcopy(one)
    if strategy == "fully_shard":
        shard(many)
    else:
        policy = ModuleWrapPolicy([nn.Linear]) if strategy == "original" else None
        many = FSDP(many, auto_wrap_policy=policy, use_orig_params=strategy == "original")
    mine = torch.optim.AdamW(one.parameters(), lr=0.1)
    theirs = {p: torch.optim.AdamW([p], lr=0.1) for p in many.parameters()}

    def step_now(parameter: nn.Parameter) -> None:
        theirs[parameter].step()
        parameter.grad = None

    for parameter in theirs:
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in range(4):
        backward(one, many, step)
        mine.step()
        mine.zero_grad()
        assert all(parameter.grad is None for parameter in theirs)
        with FSDP.summon_full_params(many) if strategy != "fully_shard" else torch.no_grad():
            assert_equal(one, many.module if isinstance(many, FSDP) else many)


@pytest.mark.parametrize("strategy", ["fully_shard", "flat", "original"])
def test_an_optimizer_may_step_each_parameter_in_the_backward(ranks: Ranks, strategy: str) -> None:
    ranks(2, body_optimizer_in_backward, strategy)


def body_pieces() -> None:
    """Hooks that would be given a line without shape, or that would be lost, are refused."""
    net = Net()
    handle = net.a.weight.register_hook(unit_norm)
    with pytest.raises(ValueError, match=r"parameter a\.weight has hooks for its gradient"):
        FSDP(net)
    handle.remove()
    wrap = functools.partial(FSDP, use_orig_params=True)
    for model in (FSDP(Net()), wrap(Net())):
        backward(net, model, 0)
        handle = next(model.parameters()).register_hook(unit_norm)
        with pytest.raises(RuntimeError, match=r"has a hook on its gradient, of which each rank"):
            backward(net, model, 1)
        handle.remove()
        backward(net, model, 2)
    one = Net()
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        many = wrap(copy.deepcopy(one), sharding_strategy=ShardingStrategy.NO_SHARD)
    for p in (one.c.weight, many.module.c.weight):
        p.register_hook(unit_norm)
    backward(one, many, 0)
    for expected, found in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_hooks_on_pieces_are_refused(ranks: Ranks) -> None:
    ranks(2, body_pieces)


def body_replicas(options: dict[str, Any], first: bool) -> None:
    """A hook that steps with the gradient of its own rank would let the ranks drift apart."""
    model: Any = Net()
    if not first:
        model = DistributedDataParallel(model, **options)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step_now) for p in model.parameters()]
    if first:
        model = DistributedDataParallel(model, **options)
    with pytest.raises(RuntimeError, match=r"parameter '.*' got a gradient in this backward pass"):
        backward(Net(), model, 0)
    for handle in handles:
        handle.remove()
    backward(Net(), model, 1)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "views"])
def test_a_step_with_the_gradient_of_one_rank_is_refused(
    ranks: Ranks, options: dict[str, Any], first: bool
) -> None:
    ranks(2, body_replicas, options, first)
