"""Guards change no number: steps without them end in the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm import Recorder, communicator, observe
from meshwright.composition import parallelize
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    keep_batch_norm_local,
    replicate,
)
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.pipelining import PipelineStage, Schedule1F1B
from meshwright.plan import Plan
from meshwright.testing import Ranks
from support.guards_off import guards_off

STEPS = 5  # some of them compare weights, batches and gradients
COMPARES = frozenset({"order", "compare parameters", "compare starting values", "compare copies"})
"""Labels of what guards alone send."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    module = nn.Sequential(*layers)
    keep_batch_norm_local(module)
    return module


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(trains: nn.Module, module: nn.Module) -> nn.Module:
    """Train as a user's loop does, each rank on batches of its own."""
    optimizer = torch.optim.AdamW(trains.parameters(), lr=0.1)
    for step in range(STEPS):
        trains(batch(step, communicator().rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def of_replicas() -> nn.Module:
    module = model()
    return trained(replicate(module), module)


def of_ddp() -> nn.Module:
    module = model()
    return trained(DistributedDataParallel(module), module)


def of_shards(mesh: Any = None) -> nn.Module:
    module = model()
    fully_shard(module[0], mesh=mesh)
    return trained(fully_shard(module, mesh=mesh), module)


def of_hybrid() -> nn.Module:
    return of_shards(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def of_the_class(*, use_orig_params: bool) -> nn.Module:
    module = model()
    module[0] = FullyShardedDataParallel(module[0], use_orig_params=use_orig_params)
    outer = FullyShardedDataParallel(module, use_orig_params=use_orig_params)
    return trained(outer, outer)


def of_pipelines() -> nn.Module:
    world, module = communicator(), model()
    half = module[2:] if world.rank else module[:2]
    stage = PipelineStage(half, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(half.parameters(), lr=0.1)
    for step in range(STEPS):
        x = batch(step, 0)
        schedule.step(*((x,) if stage.is_first else ()), **({"target": x} if stage.is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
    return half


def of_tensor_parallel() -> nn.Module:
    plan = Plan.from_toml('[axes]\ntensor = 2\n[tensor.rules]\n"0" = "colwise"\n"2" = "rowwise"\n')
    torch.manual_seed(0)
    trainable = parallelize(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        loss=nn.functional.mse_loss,
        example=batch(0, 0),
    )
    for step in range(STEPS):
        trainable.step(batch(step, 0), batch(step, 0))
    return trainable.module


STRATEGIES: dict[str, Callable[[], nn.Module]] = {
    "replicate": of_replicas,
    "ddp": of_ddp,
    "fully_shard": of_shards,
    "hybrid": of_hybrid,
    "flat": lambda: of_the_class(use_orig_params=False),
    "facade": lambda: of_the_class(use_orig_params=True),
    "1F1B": of_pipelines,
    "tensor": of_tensor_parallel,
}


def state_of(strategy: str) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The state at the end, and the labels of what was sent."""
    recorder = Recorder()
    with observe(recorder):
        module = STRATEGIES[strategy]()
    labels = {operation.label for operation in recorder.collectives}
    state = module.state_dict().items()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state
    }, labels


def body(strategy: str) -> None:
    guarded, told = state_of(strategy)
    with guards_off():
        plain, silent = state_of(strategy)
    assert plain.keys() == guarded.keys()
    for name, value in plain.items():
        assert torch.equal(value, guarded[name]), name
    assert not silent & COMPARES
    assert strategy in ("1F1B", "tensor") or told & COMPARES


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_without_guards_end_in_the_same_bits(ranks: Ranks, strategy: str) -> None:
    ranks(2, body, strategy)
