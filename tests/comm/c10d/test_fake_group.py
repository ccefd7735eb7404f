"""torch's fake process group: one process runs what any rank of any world would run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright import pipelining
from meshwright.comm import Recorder, observe
from meshwright.data_parallel import fully_shard
from meshwright.errors import PipeliningShapeError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.plan import Plan, TensorPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.internals.axes import Axes

WORLD = 8


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def sharded(**more: Any) -> nn.Module:
    model: Any = mlp()
    fully_shard(model[0], **more)
    return fully_shard(model, **more)


def hybrid() -> nn.Module:
    return sharded(mesh=init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("a", "b")))


def cut() -> nn.Module:
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(mlp(), init_device_mesh("cpu", (WORLD,)), styles)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def run_schedule(kind: Any, rank: int, *, is_declared: bool = True) -> None:
    count = 1 if issubclass(kind, pipelining.PipelineScheduleSingle) else 2
    example: Any = {"input_args": torch.empty(2, 8)} if is_declared else {}
    stages = [
        pipelining.PipelineStage(
            nn.Linear(8, 8), rank + WORLD * turn, count * WORLD, torch.device("cpu"), **example
        )
        for turn in range(count)
    ]
    loss = nn.functional.mse_loss
    schedule = kind(stages[0] if count == 1 else stages, 2 * WORLD, loss_fn=loss)
    x = torch.ones(4 * WORLD, 8)
    for _ in range(2):
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == WORLD - 1 else {}))
    assert all(p.grad is not None for stage in stages for p in stage.submod.parameters())


def run_traced(rank: int) -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(WORLD))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = y = self.layers[0](x)
            for number, layer in enumerate(self.layers):
                if number:
                    pipelining.pipe_split()
                    y = layer(y) + (first if number in (3, WORLD - 1) else 0)
            return y

    pipe = pipelining.pipeline(Skip(), (torch.ones(2, 8),))
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 8)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == WORLD - 1 else {}))


def run_plan(axes: dict[str, int]) -> None:
    cuts = TensorPlan(rules={"0": "colwise", "2": "rowwise"} if "tensor" in axes else None)
    trainable = mw.parallelize(
        mlp(),
        Plan(axes=Axes.of(axes), tensor=cuts),
        optimizer=torch.optim.AdamW,
        loss=nn.functional.mse_loss,
        example=torch.ones(2, 8),
    )
    for _ in range(2):
        assert math.isfinite(trainable.step(torch.ones(4, 8), torch.ones(4, 8)).loss)


def body(rank: int, backend: str) -> None:
    with warnings.catch_warnings(record=True) as caught, observe(recorder := Recorder()):
        warnings.simplefilter("always")
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=WORLD)
        wrappers = (sharded, hybrid, cut, lambda: mw.replicate(mlp()))
        for wrap in (*wrappers, lambda: mw.DistributedDataParallel(mlp())):
            train(wrap())
        wrapped = FullyShardedDataParallel(mlp())
        wrapped(torch.ones(4, 8)).sum().backward()
        for name in ("ScheduleGPipe", "ScheduleInterleaved1F1B"):
            run_schedule(getattr(pipelining, name), rank)
        run_traced(rank)
        for axes in ({"replicate": 8}, {"shard": 8}, {"replicate": 2, "tensor": 4}):
            run_plan(axes)
        if rank:
            with pytest.raises(PipeliningShapeError, match="does not know what stage"):
                run_schedule(pipelining.Schedule1F1B, rank, is_declared=False)
    kinds = {collective.kind for collective in recorder.collectives}
    assert kinds >= {"all_gather", "reduce_scatter", "all_reduce", "send", "recv"}, kinds
    told = [str(each.message) for each in caught]
    assert sum("no processes" in text for text in told) == 1, told


@pytest.mark.parametrize(
    ("rank", "backend"),
    [
        (3, "fake"),
        pytest.param(0, "cpu:fake", marks=pytest.mark.slow),
        pytest.param(WORLD - 1, "cpu:fake,cuda:fake", marks=pytest.mark.slow),
    ],
)
def test_every_wrapper_runs_as_any_rank_of_any_world(ranks: Ranks, rank: int, backend: str) -> None:
    ranks(1, body, rank, backend, connected=False)
