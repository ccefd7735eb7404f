"""The strategies that are compared with the plain model, and the training that compares them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpu.places import Place
from meshwright.comm import Communicator, communicator
from meshwright.compiler import aot_backend
from meshwright.data_parallel import (
    CPUOffloadPolicy,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from meshwright.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.gradients import clip_grad_norm_
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, ROWS, STEPS = 8, 16, 4


class Block(nn.Module):
    """A layer with a shortcut, whose two halves can be cut by an axis of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three blocks and what is read from them, made on the host: equal on all devices."""
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(DIM, 3)).to(dtype=dtype)
    for parameter in model.parameters():
        drawn = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        parameter.data.copy_(drawn.uniform_(-0.5, 0.5, generator=draw))
    return model


@dataclass(frozen=True, kw_only=True)
class Way:
    """One strategy: how a model is laid out, and how a step of it goes."""

    wrap: Callable[[nn.Module, Place], nn.Module]
    dtype: torch.dtype = torch.float64
    computes_in: torch.dtype | None = None
    parts: int = 1
    """Backward passes of a step."""
    clip: float | None = None
    cuts_batch: bool = True
    """Whether each rank reads rows of its own."""
    tolerance: float = 1e-12
    is_compiled: bool = False
    steps_on_host: bool = False
    """Whether the optimizer runs on the host, which then has to wait for gradients."""


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    for part in model.children():
        if isinstance(part, Block):
            fully_shard(part, **options)
    return fully_shard(model, **options)


def _hybrid(model: nn.Module, place: Place) -> nn.Module:
    sizes = (communicator().size, 1) if communicator().size == 2 else (1, communicator().size)
    mesh = init_device_mesh(place.device.type, sizes, mesh_dim_names=("replicate", "shard"))
    return _sharded(model, mesh=mesh)


def _wrapped(model: nn.Module, place: Place, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    with warnings.catch_warnings():  # the class says that one rank shards nothing
        warnings.filterwarnings("ignore", ".*switching to use `NO_SHARD`", UserWarning)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=place.device, **options
        )


def _cut(model: nn.Module, place: Place) -> nn.Module:
    mesh = init_device_mesh(place.device.type, (communicator().size,), mesh_dim_names=("tensor",))
    styles = {}
    for name, part in model.named_children():
        if isinstance(part, Block):
            styles |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
    return parallelize_module(model, mesh, styles)


_LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_BF16: dict[str, Any] = {
    "dtype": torch.float32,
    "computes_in": torch.bfloat16,
    "tolerance": 1e-6,
}

WAYS: dict[str, Way] = {
    "replicate": Way(wrap=lambda model, _: replicate(model, bucket_cap_mb=0.0005)),
    "DistributedDataParallel": Way(wrap=lambda model, _: DistributedDataParallel(model), clip=1.0),
    "fully_shard": Way(wrap=lambda model, _: _sharded(model), clip=1.0),
    "fully_shard, bf16": Way(
        wrap=lambda model, _: _sharded(model, mp_policy=MixedPrecisionPolicy(**_LOW)), **_BF16
    ),
    "fully_shard, offload": Way(
        wrap=lambda model, _: _sharded(model, offload_policy=CPUOffloadPolicy()),
        steps_on_host=True,
    ),
    "hybrid": Way(wrap=_hybrid),
    "class": Way(wrap=lambda model, place: _wrapped(model, place, use_orig_params=True), clip=1.0),
    "class, flat": Way(wrap=lambda model, place: _wrapped(model, place, use_orig_params=False)),
    "class, bf16": Way(
        wrap=lambda model, place: _wrapped(model, place, mixed_precision=MixedPrecision(**_LOW)),
        **_BF16,
    ),
    "class, offload": Way(
        wrap=lambda model, place: _wrapped(model, place, cpu_offload=CPUOffload(True)),
        steps_on_host=True,
    ),
    "class, accumulation": Way(
        wrap=lambda model, place: _wrapped(model, place, use_orig_params=True), parts=2
    ),
    "tensor parallel": Way(wrap=_cut, cuts_batch=False),
    "compiled replicas": Way(
        wrap=lambda model, _: torch.compile(replicate(model), backend=aot_backend),
        is_compiled=True,
    ),
}


class Run:
    """The training of one model, step by step, on the shares of some ranks in turn."""

    def __init__(self, model: nn.Module, way: Way, place: Place, shares: list[slice]) -> None:
        self.model = model
        self.way = way
        self.shares = shares
        draw = torch.Generator().manual_seed(7)
        inputs = torch.empty(STEPS, ROWS, DIM, dtype=way.dtype, device="cpu")
        targets = torch.empty(STEPS, ROWS, 3, dtype=way.dtype, device="cpu")
        self.inputs, self.targets = place.to(
            inputs.normal_(generator=draw), targets.normal_(generator=draw)
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number: int) -> torch.Tensor:
        """Train on one batch; the mean loss stays on the device."""
        self.optimizer.zero_grad()
        rows = [part for share in self.shares for part in cut(share, self.way.parts)]
        losses = []
        for index, part in enumerate(rows):
            with self._waiting(is_last=index == len(rows) - 1):
                output = self.call(self.inputs[number, part])
                loss = nn.functional.mse_loss(output, self.targets[number, part])
                (loss / len(rows)).backward()
            losses.append(loss.detach())
        if self.way.clip is not None:
            self.clip(self.way.clip)
        self.optimizer.step()
        return torch.stack(losses).mean()

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).to(self.way.dtype)

    def clip(self, norm: float) -> None:
        clip_grad_norm_(self.model, norm)

    def _waiting(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        if is_last or not isinstance(self.model, FullyShardedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()


class PlainRun(Run):
    """The same in one process, one share after the other; low precision by a cast of its own."""

    def call(self, x: torch.Tensor) -> torch.Tensor:
        low = self.way.computes_in
        if low is None:
            return super().call(x)
        cast = {name: value.to(low) for name, value in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, (x.to(low),)).to(self.way.dtype)

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)


def cut(rows: slice, parts: int) -> list[slice]:
    """Equal parts of ``rows``."""
    count = (rows.stop - rows.start) // parts
    return [slice(rows.start + i * count, rows.start + (i + 1) * count) for i in range(parts)]


def both(name: str, place: Place, world: Communicator) -> tuple[PlainRun, Run]:
    """The plain run and this rank's part of the run under a strategy, of the same model."""
    way = WAYS[name]
    one = net(way.dtype).to(place.device)
    many = way.wrap(copy.deepcopy(one), place)
    every = cut(slice(0, ROWS), world.size) if way.cuts_batch else [slice(0, ROWS)]
    mine = [every[world.rank]] if way.cuts_batch else every
    return PlainRun(one, way, place, every), Run(many, way, place, mine)
