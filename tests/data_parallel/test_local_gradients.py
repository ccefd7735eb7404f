"""What autograd shows of one rank's gradient, and what of the mean: a table of docs/concepts.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial
from torch.utils.checkpoint import checkpoint

from meshwright.comm import communicator
from meshwright.compiler import aot_backend
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import loss

NAME = "2.weight"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def in_units(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


def in_root(model: nn.Sequential) -> Any:
    fully_shard(model[0])
    return fully_shard(model)


def in_wrappers(model: nn.Sequential, *, use_orig_params: bool) -> nn.Module:
    model[2] = FullyShardedDataParallel(model[2], use_orig_params=use_orig_params)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params)


def flat(model: nn.Sequential) -> nn.Module:
    return in_wrappers(model, use_orig_params=False)


def original(model: nn.Sequential) -> nn.Module:
    return in_wrappers(model, use_orig_params=True)


def compiled(model: nn.Sequential) -> Any:
    return torch.compile(replicate(model), backend=aot_backend)


Wrap = Callable[[nn.Sequential], Any]
REPLICAS: tuple[Wrap, ...] = (replicate, DistributedDataParallel)
SHARDED: tuple[Wrap, ...] = (in_units, flat, original)


def share(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def gradients_of(rank: int) -> dict[str, torch.Tensor]:
    """Those of one process that has the batch of ``rank``."""
    one = net()
    loss(one, share(rank)).backward()
    return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}


def kind(gradient: torch.Tensor, name: str = NAME) -> str:
    """Whether ``gradient`` is of this rank or the mean over all."""
    world = communicator()
    each = [gradients_of(rank)[name] for rank in range(world.size)]
    found = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    mean = sum(each[1:], each[0]) / world.size
    if found.shape != mean.shape:  # a part of a line of elements
        parts = mean.flatten().chunk(world.size)
        found, mean = found.flatten(), parts[world.rank]
    if found.shape == mean.shape and torch.allclose(found, mean, rtol=1e-12):
        return "mean"
    own = each[world.rank]
    return "own" if torch.allclose(found, own, rtol=1e-12) else "other"


def held(ours: nn.Module) -> nn.Parameter:
    """The parameter called `NAME`, or the flat one that it has become."""
    return list(ours.parameters())[-1]


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over samples that depends on gradients."""
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient.square().mean() + y.square().mean()


def body_autograd_grad() -> None:
    mine = share(communicator().rank)
    one = net()
    x = mine.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(one, x), x)
    both = torch.cat([share(rank) for rank in range(communicator().size)]).requires_grad_()
    penalties = torch.autograd.grad(penalty(one, both), list(one.parameters()))
    for wrap in (*REPLICAS, *SHARDED):
        ours = wrap(net())
        own = list(ours.parameters())
        for inputs in ([x], [x, *own]):
            if wrap in SHARDED and len(inputs) > 1:
                with pytest.raises(RuntimeError, match="not have been used in the graph"):
                    torch.autograd.grad(loss(ours, x), inputs)
                continue
            found = torch.autograd.grad(loss(ours, x), inputs)
            torch.testing.assert_close(found[0], expected)
            for gradient, (name, _) in zip(found[1:], one.named_parameters(), strict=False):
                assert kind(gradient, name) == "own", name
        penalized = wrap(net())
        if wrap in SHARDED:
            with pytest.raises(RuntimeError, match="does not support gradients of gradients"):
                penalty(penalized, x)
        else:
            penalty(penalized, x).backward()
            means = [p.grad for p in penalized.parameters()]
            torch.testing.assert_close(means, list(penalties))
        assert all(parameter.grad is None for parameter in ours.parameters())
        loss(ours, mine).backward()
        gradient = held(ours).grad
        assert gradient is not None
        assert kind(gradient) == "mean"


class Turned(nn.Module):
    """A layer of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.turn.dtype) @ self.turn).real


def body_complex() -> None:
    world = communicator()

    def built() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Turned(), nn.Tanh(), nn.Linear(3, 2)).double()

    one = built()
    x = torch.cat([share(rank) for rank in range(world.size)])
    loss(one, x).backward()
    for wrap in (*REPLICAS, in_root, flat, original):
        ours = wrap(built())
        part = share(world.rank).requires_grad_()
        loss(ours, part).backward(inputs=[part])
        assert all(parameter.grad is None for parameter in ours.parameters()), wrap
        loss(ours, part).backward()
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
        optimizer.step()
        with torch.no_grad():
            stepped = torch.func.functional_call(
                one, {name: p - p.grad for name, p in one.named_parameters()}, (x,)
            )
            found = ours(share(world.rank))
        torch.testing.assert_close(found, stepped.chunk(world.size)[world.rank])


def body_kept_sums() -> None:
    """A pass for gradients of inputs leaves sums of earlier passes alone."""
    mine = share(communicator().rank)
    for setting in ("requires_gradient_sync", "requires_all_reduce", "is_last_backward"):
        if setting == "requires_all_reduce":
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            ours: Any = fully_shard(net(), mesh=mesh)
        else:
            ours = in_units(net())
        heard: list[torch.Tensor] = []
        for parameter in ours.parameters():
            parameter.register_post_accumulate_grad_hook(heard.append)
        for is_last in (False, True):
            getattr(ours, f"set_{setting}")(is_last)
            for graph_stays in (True, False):
                x = mine.clone().requires_grad_()
                total = loss(ours, x)
                torch.autograd.grad(total, x, retain_graph=graph_stays)
                assert not heard, setting
            loss(ours, mine).backward()
        assert len(heard) == 3
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None
            assert kind(parameter.grad / 2, name) == "mean", (setting, name)


def body_graphs_again() -> None:
    """A graph of two forwards that runs again needs the weights of both until both have run."""
    one, ours = net(), in_root(net())
    for model in (one, ours):
        x = share(0).requires_grad_()
        losses = [loss(model, x * f) + model[2].weight.square().sum() for f in (1, 2)]
        torch.autograd.grad(sum(losses), x, retain_graph=True)
        sum(losses).backward()  # pyrefly: ignore
    for found, expected in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)  # pyrefly: ignore


class Recomputed(nn.Sequential):
    """Layers that run again in each backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def body_recomputed_again() -> None:
    """Modules that run again for the second pass of a graph find whole weights."""
    found: list[torch.Tensor] = []
    for wrap in (lambda model: model, in_root, flat, original):
        model = wrap(Recomputed(*net()))
        x = share(0).requires_grad_()
        total = loss(model, x)
        torch.autograd.grad(total, x, retain_graph=True)
        total.backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        with torch.no_grad():
            found.append(model(x))
    for mine in found[1:]:
        torch.testing.assert_close(mine, found[0])


def body_compiled() -> None:
    """Sums are in the backward of a compiled replica, whoever runs it."""
    ours = compiled(net())
    found = torch.autograd.grad(loss(ours, share(communicator().rank)), list(ours.parameters()))
    names = [name for name, _ in net().named_parameters()]
    assert [kind(g, name) for g, name in zip(found, names, strict=True)] == ["mean"] * 3
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        assert seen_by_hooks(compiled, register) == ("own", "mean"), register


def seen_by_hooks(wrap: Wrap, register: str) -> tuple[str, str]:
    """What a hook is given, and what ``.grad`` is when the backward has ended."""
    seen: list[torch.Tensor] = []
    ours = wrap(net())
    parameter = held(ours)

    def look(given: torch.Tensor) -> None:
        gradient = given.grad if register == "register_post_accumulate_grad_hook" else given
        assert gradient is not None
        seen.append(gradient.detach().clone())

    getattr(parameter, register)(look)
    loss(ours, share(communicator().rank)).backward()
    assert parameter.grad is not None
    (found,) = seen
    return kind(found), kind(parameter.grad)


def body_hooks() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        for wrap in REPLICAS:
            assert seen_by_hooks(wrap, register) == ("own", "mean"), (wrap, register)
        assert seen_by_hooks(in_units, register) == ("mean", "mean"), register
    for wrap in (flat, original):
        found = seen_by_hooks(wrap, "register_post_accumulate_grad_hook")
        assert found == ("mean", "mean")
        with pytest.raises(RuntimeError, match="has a hook on its gradient"):
            seen_by_hooks(wrap, "register_hook")


def body_full_tensor() -> None:
    """What a loss reads by `full_tensor` is reduced as the caller says, not as the unit's are."""
    rank = communicator().rank
    for average in (True, False):
        ours = in_units(net())
        placements = [Partial("avg")] if average else None
        weight = ours[2].weight.full_tensor(grad_placements=placements)
        own = gradients_of(rank)[NAME]
        (weight * own).sum().backward()  # its gradient is that of this rank's data
        gradient = ours[2].weight.grad
        if average:
            assert kind(gradient) == "mean"
        else:
            mine = own.chunk(communicator().size)[rank]
            torch.testing.assert_close(gradient.to_local(), mine)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body_autograd_grad, id="grad"),
        pytest.param(body_full_tensor, id="full_tensor"),
        pytest.param(body_complex, id="complex"),
        pytest.param(body_kept_sums, id="kept"),
        pytest.param(body_graphs_again, id="again"),
        pytest.param(body_recomputed_again, id="recomputed"),
        pytest.param(
            body_compiled,
            id="compiled",
            marks=pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode"),
        ),
        pytest.param(body_hooks, id="hooks"),
    ],
)
@pytest.mark.few(2)
def test_the_table_of_the_docs_is_true(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
