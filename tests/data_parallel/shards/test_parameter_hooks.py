"""Hooks that users put on sharded parameters: what they do is what they do in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from meshwright import parallelize_module
from meshwright.comm import communicator
from meshwright.data_parallel import (
    DistributedDataParallel,
    FSDPModule,
    flat_groups,
    fully_shard,
)
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks
from support.in_backward import apply_in_backward
from support.late import raises_by_now


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


def body_flat_in_backward() -> None:
    """An optimizer that steps the flat view rests where only inputs are asked for gradients."""
    one = Net()
    many = shard(copy.deepcopy(one))
    for held in (list(one.parameters()), list(flat_groups(many))):
        for each in held:
            optimizer = torch.optim.AdamW([each], lr=0.1)

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            each.register_post_accumulate_grad_hook(step)
    world = communicator()
    for number in range(3):
        x = batch(number)
        for net, part in ((one, x), (many, x.chunk(world.size)[world.rank])):
            given = part.clone().requires_grad_()
            loss = net(given).square().mean()
            torch.autograd.grad(loss, given, retain_graph=True)
            loss.backward()
        assert_equal(one, many)


def body_hooks_while_sharding() -> None:
    """What was put on a parameter whose unit was sharded alone, and lost a shared weight later."""
    net = Net()
    heard: list[str] = []
    net.a.bias.register_post_accumulate_grad_hook(lambda _: heard.append("before"))
    fully_shard(net.a)
    net.a.bias.register_post_accumulate_grad_hook(lambda _: heard.append("after"))
    net.a.weight.register_post_accumulate_grad_hook(lambda _: heard.append("weight"))
    fully_shard(net.b)
    backward(Net(), fully_shard(net), 0)
    assert sorted(heard) == ["after", "before", "weight"]


def test_hooks_on_gradients_get_the_mean(ranks: Ranks) -> None:
    ranks(2, body_gradient_hooks)
    ranks(2, body_hooks_while_sharding)
    ranks(2, body_flat_view)
    ranks(2, body_flat_in_backward)


STRATEGIES: dict[str, Any] = {
    "fully_shard": shard,
    "flat": FSDP,
    "original": functools.partial(
        FSDP, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]), use_orig_params=True
    ),
    "hybrid": lambda net: fully_shard(net, mesh=hybrid_mesh()),
    "hybrid original": lambda net: FSDP(
        net,
        device_mesh=hybrid_mesh(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    ),
    "flat groups": shard,
    "tensor": lambda net: parallelize_module(
        net,
        init_device_mesh("cpu", (communicator().size,), mesh_dim_names=("tensor",)),
        {
            "a": ColwiseParallel(),
            "b": RowwiseParallel(),
            "c": ColwiseParallel(output_layouts=Replicate()),
        },
    ),
}


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def not_tied(net: Net) -> Net:
    net.b = nn.Linear(5, 5).double()
    return net


def by_hook(parameters: Any, **options: Any) -> None:
    """A step of each parameter in a hook of the user's own."""
    for parameter in parameters:
        optimizer = torch.optim.AdamW([parameter], **options)

        def step_now(parameter: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step_now)


def by_torch(parameters: Any, **options: Any) -> None:
    apply_in_backward(torch.optim.AdamW, parameters, options)


def body_optimizer_in_backward(strategies: list[str], apply: Any) -> None:
    """Also where it was applied before, and where several passes make one gradient."""
    for strategy, when in itertools.product(strategies, ("before", "after")):
        where = f"{strategy}, applied {when}"
        one = not_tied(Net()) if strategy == "tensor" else Net()
        many: Any = copy.deepcopy(one)
        if when == "before":
            if strategy == "flat groups":
                continue
            apply(many.parameters(), lr=0.1)
            if strategy in ("flat", "tensor"):
                with pytest.raises(ValueError, match=r"has hooks for its gradient"):
                    STRATEGIES[strategy](many)
                continue
            if apply is by_hook and "original" not in strategy:
                many = STRATEGIES[strategy](many)  # the hook knows other parameters
                with pytest.raises(RuntimeError, match="had before it was sharded"):
                    backward(one, many, 0)
                continue
        many = STRATEGIES[strategy](many)
        held = flat_groups(many) if strategy == "flat groups" else list(many.parameters())
        if when == "after":
            apply(held, lr=0.1)
        if strategy == "flat" and apply is by_torch:
            with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
                backward(one, many, 0)
            continue
        mine = torch.optim.AdamW(one.parameters(), lr=0.1)
        for step in range(4):
            for is_last in (False, True) if step % 2 and strategy != "tensor" else (True,):
                inputs = batch(2 * step + is_last)
                one(inputs).square().mean().backward()
                world = communicator()
                share = inputs if strategy == "tensor" else inputs.chunk(world.size)[world.rank]
                with passing(many, is_last):
                    many(share).square().mean().backward()
            mine.step()
            mine.zero_grad()
            assert all(parameter.grad is None for parameter in held), where
            with FSDP.summon_full_params(many) if isinstance(many, FSDP) else torch.no_grad():
                assert_equal(one, many.module if isinstance(many, FSDP) else many)


@contextlib.contextmanager
def passing(model: Any, is_last: bool) -> Iterator[None]:
    """Gradients of a pass that is not the last stay whole on each rank."""
    if isinstance(model, FSDP):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        yield


@pytest.mark.parametrize("apply", [by_hook, pytest.param(by_torch, marks=pytest.mark.slow)])
def test_an_optimizer_may_step_each_parameter_in_the_backward(ranks: Ranks, apply: Any) -> None:
    few = [name for name in STRATEGIES if "hybrid" not in name]
    ranks(2, body_optimizer_in_backward, few, apply)
    ranks(4, body_optimizer_in_backward, ["hybrid", "hybrid original"], apply)


def body_not_in_the_backward() -> None:
    """What torch was told not to hook, what has state of whole parameters, and flat parameters."""
    wanted = functools.partial(apply_in_backward, torch.optim.SGD)
    many: Any = shard(Net())
    wanted(many.parameters(), {"lr": 0.1}, register_hook=False)
    backward(Net(), many, 0)
    assert all(parameter.grad is not None for parameter in many.parameters())
    net = Net()
    apply_in_backward(torch.optim.Adagrad, net.parameters(), {})
    with pytest.raises(ValueError, match=r"Adagrad that steps 'weight' in the backward has state"):
        shard(net)
    (flat,) = flat_groups(Net())
    for register in (flat.register_hook, flat.register_post_accumulate_grad_hook):
        with pytest.raises(TypeError, match="belong to the parameters of the model"):
            register(print)
    with pytest.raises(TypeError, match="optimizers in the backward, belong to the parameters"):
        wanted([flat], {"lr": 0.1})
    many = shard(Net())
    flat_groups(many)[0].register_hook(unit_norm)
    with pytest.raises(RuntimeError, match="flat parameter of '.*' and . more has a hook"):
        backward(Net(), many, 0)


def test_what_cannot_step_in_the_backward_is_refused(ranks: Ranks) -> None:
    ranks(2, body_not_in_the_backward)


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

    def train() -> None:
        backward(Net(), model, 1)
        next(iter(optimizers.values())).step()

    # The first parameters were stepped before anybody could refuse it: copies have parted.
    with raises_by_now(CollectiveMismatchError, match="copies of the weights"):
        for _ in range(1 if communicator().is_on_host else 2):  # of a device a pass later
            train()
    model.module.load_state_dict(Net().state_dict())
    backward(Net(), model, 4)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "views"])
def test_a_step_with_the_gradient_of_one_rank_is_refused(
    ranks: Ranks, options: dict[str, Any], first: bool
) -> None:
    ranks(2, body_replicas, options, first)
