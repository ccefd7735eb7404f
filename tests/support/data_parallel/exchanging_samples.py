"""A model with experts that exchange samples, its layouts, and one process to compare it with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Communicator, communicator
from meshwright.mesh import DeviceMesh, init_device_mesh
from support.internals.comm import exchange_over, local_part_of, parameter_at_rest
from support.internals.data_parallel import MARK
from support.internals.layout import Shard, chunk

WIDTH = 4


class _Gather(torch.autograd.Function):
    """Rows of all ranks; the gradients that they have for this rank's rows are summed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.ranks = ranks
        rows = rows.contiguous()
        found = rows.new_empty(ranks.size * len(rows), *rows.shape[1:])
        ranks.all_gather(found, rows, label="dispatch").wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.ranks), None


class _Sum(torch.autograd.Function):
    """This rank's rows of the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.ranks = ranks
        return _sum(rows, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(gradients[0], ctx.ranks), None


def _sum(rows: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    found = rows.new_empty(len(rows) // ranks.size, *rows.shape[1:])
    ranks.reduce_scatter(found, rows.contiguous(), label="combine").wait()
    return found


def _part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """Experts, over the ranks of a mesh once `exchange` was called."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 6) / 2)
        self.bias = nn.Parameter(torch.randn(count, 6) / 2)
        self.down = nn.Parameter(torch.randn(count, 6, WIDTH) / 2)
        self.ranks: Communicator | None = None
        self.first, self.is_local = 0, False
        self.on_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Changes this rank's gradient of ``up``."""

    def exchange(self, mesh: DeviceMesh, *, is_local: bool = False) -> None:
        """Split them over ``mesh``; they compute on local leaves, or on parts of DTensors."""
        self.is_local = is_local
        if is_local:
            vars(self)[MARK] = SimpleNamespace(partial=())
        self.ranks = communicator(mesh.get_group(), axis="ep")
        self.first, length = chunk(len(self.up), self.ranks.size, self.ranks.rank)
        for name, whole in list(self.named_parameters(recurse=False)):
            shape, strides = whole.shape, whole.stride()
            local = whole.detach()[self.first : self.first + length].clone()
            self._parameters[name] = parameter_at_rest(
                local, mesh, [Shard(0)], shape, strides, requires_grad=whole.requires_grad
            )
        exchange_over(self, mesh)

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        parts: Callable[[Any], Any] = local_part_of if self.is_local else _part
        up, bias, down = map(parts, (self.up, self.bias, self.down))
        if self.ranks is not None:
            rows, weights = (_Gather.apply(each, self.ranks) for each in (rows, weights))
            chosen = _Gather.apply(chosen, self.ranks)
        if self.on_gradient is not None:
            up.register_hook(self.on_gradient)
        out = torch.zeros_like(rows)
        for index in range(len(up)):
            share = (weights * (chosen == self.first + index)).sum(1, keepdim=True)
            out = out + share * ((rows @ up[index] + bias[index]).tanh() @ down[index])
        return out if self.ranks is None else _Sum.apply(out, self.ranks)


class Block(nn.Module):
    def __init__(self, count: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, count)
        self.experts = Experts(count)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.mix, x, use_reentrant=False)
        return self.mix(x)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(self.norm(x)).tanh()
        weights, chosen = self.router(x).softmax(1).topk(2)
        return x + self.experts(x, chosen, weights)


class Net(nn.Module):
    """Two blocks with experts between dense layers."""

    def __init__(self, count: int = 4, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(count, recomputes=recomputes) for _ in range(2)])
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net(count: int = 4, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(count, **options).double()


def spread(one: Net, mesh: DeviceMesh) -> Net:
    """A copy of ``one`` whose experts lie over ``mesh``, those of a block each in its way."""
    model = copy.deepcopy(one)
    for block, is_local in zip(model.blocks, (True, False), strict=True):
        block.experts.exchange(mesh, is_local=is_local)
    return model


def meshes(shape: Sequence[int]) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """The mesh of ``shape`` (shard, ep) or (replicate, shard, ep), ep, and the data axes."""
    names = ("replicate", "shard", "ep")[-len(shape) :]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    dense = mesh["shard", "ep"]._flatten("dense")
    data = dense if len(shape) == 2 else DeviceMesh._concatenate([mesh["replicate"], dense])
    return mesh, mesh["ep"], data


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(rows, width, generator=drawn) for width in (3, 2))
    return x.double(), y.double()


def share(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    world = communicator()
    return [tensor.chunk(world.size)[world.rank] for tensor in tensors]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean() * 10


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(model: nn.Module, one: nn.Module, *, tolerance: float = 1e-9) -> None:
    """Names, weights and gradients are those of one process."""
    mine, theirs = list(model.named_parameters()), list(one.named_parameters())
    assert [name for name, _ in mine] == [name for name, _ in theirs]
    for (name, parameter), (_, expected) in zip(mine, theirs, strict=True):
        pairs = [(parameter.detach(), expected.detach())]
        assert (parameter.grad is None) is (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            pairs.append((parameter.grad, expected.grad))
        for found, wanted in pairs:
            torch.testing.assert_close(
                whole(found),
                wanted,
                rtol=tolerance,
                atol=tolerance * math.sqrt(tolerance),
                msg=lambda text, name=name: f"{name}: {text}",
            )


def train(
    model: nn.Module,
    one: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    steps: int = 3,
    clip: Callable[[nn.Module], torch.Tensor] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Train both; gradients, weights and, with ``clip``, norms agree after each step."""
    ours, theirs = optimizer(model.parameters()), optimizer(one.parameters())
    for step in range(steps):
        given = batch(step)
        loss_of(model, *share(given)).backward()
        loss_of(one, *given).backward()
        same(model, one, tolerance=tolerance)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            torch.testing.assert_close(whole(clip(model)), norm, rtol=1e-9, atol=1e-12)
            same(model, one, tolerance=tolerance)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    same(model, one, tolerance=tolerance)
