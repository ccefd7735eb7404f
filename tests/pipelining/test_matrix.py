"""Schedules x data parallelism x what a model and its batch may be like, against one process.

All pairs of two columns are in the quick run, all combinations among the slow ones.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.comm import communicator
from meshwright.data_parallel import keep_batch_norm_local
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Source,
    StageEdges,
    Tie,
    get_schedule_class,
)
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import Ranks
from support.internals.comm import whole
from support.internals.schedule import stage_ranks
from support.pairwise import pairwise

WIDTH = 6
SPREADS = ("plain", "replicate", "fully_shard", "wrapper")
CASES = ("uneven", "tied", "skip", "kwargs", "batch norm")
SIZES = (2, 4)


class Part(nn.Module):
    """One stage: a layer of ``kind``, and what goes round it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, *skipped: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.tanh(self.norm(self.layer(x))) + sum(skipped)
        return x + (y if scale is None else y * scale)


def parts(case: str, count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    made = [Part(case).double() for _ in range(count)]
    if case == "tied":
        made[-1].layer.weight = made[0].layer.weight
    return made


def edges_of(case: str, count: int) -> list[StageEdges]:
    """The arguments of each stage; in a U, early outputs are read again far behind."""
    found = []
    for stage in range(count):
        args = [Source(None, 0)] if stage == 0 else [Source(stage - 1, 0)]
        if case == "skip" and stage >= count // 2 and stage != count - 1 - stage:
            source = count - 1 - stage
            args += [Source(source, 0)] if source < stage - 1 else []
        kwargs = (("scale", Source(None, "scale")),) if case == "kwargs" else ()
        found.append(StageEdges(tuple(args), kwargs))
    return found


def run_alone(
    ones: Sequence[nn.Module], edges: Sequence[StageEdges], x: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    values: list[torch.Tensor] = []
    for one, edge in zip(ones, edges, strict=True):
        args = [x if s.stage is None else values[s.stage] for s in edge.args]
        values.append(one(*args, **kwargs))
    return values[-1]


def spread(module: nn.Module, kind: str, mesh: Any) -> nn.Module:
    # Of BatchNorm each rank keeps the statistics of its own share here.
    keep_batch_norm_local(module)
    if kind == "replicate":
        return mw.replicate(module, device_mesh=mesh, broadcast_buffers=False)
    if kind == "fully_shard":
        mw.fully_shard(module.layer, mesh=mesh)
        return mw.fully_shard(module, mesh=mesh)
    if kind == "wrapper":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            return mw.FullyShardedDataParallel(
                module, process_group=mesh.get_group(), use_orig_params=True
            )
    return module


def values_of(module: nn.Module, kind: str, read: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Whole gradients (or what ``read`` takes) by original name."""
    if kind != "wrapper":
        return {name: read(parameter) for name, parameter in module.named_parameters()}
    summon = mw.FullyShardedDataParallel.summon_full_params
    with summon(module, with_grads=True):
        found = {name: read(p).clone() for name, p in module.named_parameters()}
    return {name.removeprefix("_fsdp_wrapped_module."): value for name, value in found.items()}


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return whole(parameter.grad)


def body(combinations: Sequence[tuple[str, str, str]]) -> None:
    for name, kind, case in combinations:
        try:
            one_case(name, kind, case)
        except BaseException as error:
            error.add_note(f"in {name} x {kind} x {case}")
            raise


def one_case(name: str, kind: str, case: str) -> None:
    world = communicator()
    replicas = 1 if kind == "plain" else world.size // 2
    mesh = init_device_mesh(
        "cpu", (replicas, world.size // replicas), mesh_dim_names=("data", "pipeline")
    )
    pipeline, share = communicator(mesh.get_group("pipeline")), mesh.get_local_rank("data")
    schedule_class = get_schedule_class(name)
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    count = pipeline.size * (2 if is_multi else 1)
    microbatches = 2 * pipeline.size
    holders = stage_ranks(pipeline.size, count, "v" if "V" in name else "loop")
    mine = [s for s, rank in enumerate(holders) if rank == pipeline.rank]
    ones, edges = parts(case, count), edges_of(case, count)
    ties = (Tie(0, ((0, "layer.weight"), (count - 1, "layer.weight"))),) if case == "tied" else ()
    modules = {s: spread(copy.deepcopy(ones[s]), kind, mesh["data"]) for s in mine}
    stages = [
        PipelineStage(
            modules[s], s, count, torch.device("cpu"), group=pipeline.group, edges=edges, ties=ties
        )
        for s in mine
    ]
    mean = nn.MSELoss()
    schedule = schedule_class(stages if is_multi else stages[0], microbatches, loss_fn=mean)
    rows = 2 * microbatches + (1 if case == "uneven" else 0)
    torch.manual_seed(2)
    x, target = torch.randn(2, replicas * rows, WIDTH, dtype=torch.float64)
    extra = {"scale": torch.rand(len(x), 1, dtype=torch.float64)} if case == "kwargs" else {}
    parted = {key: value.chunk(replicas)[share] for key, value in extra.items()}
    last = {"target": target.chunk(replicas)[share]} if count - 1 in mine else {}
    schedule.step(*((x.chunk(replicas)[share],) if 0 in mine else ()), **parted, **last)

    if case == "batch norm":  # one process that is given the same microbatches
        cut = [
            (a, b)
            for xs, ys in zip(x.chunk(replicas), target.chunk(replicas), strict=True)
            for a, b in zip(xs.chunk(microbatches), ys.chunk(microbatches), strict=True)
        ]
        for a, b in cut:
            (mean(run_alone(ones, edges, a, extra), b) / len(cut)).backward()
    else:
        mean(run_alone(ones, edges, x, extra), target).backward()
    for s in mine:
        found = values_of(modules[s], kind, gradient)
        assert len(found) == 4
        for key, parameter in ones[s].named_parameters():
            torch.testing.assert_close(
                found[key],
                parameter.grad,
                rtol=1e-9,
                atol=1e-12,
                msg=partial("stage {}, {}: {}".format, s, key),
            )


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair(ranks: Ranks, size: int) -> None:
    combinations = [
        (str(a), str(b), str(c)) for a, b, c in pairwise((SCHEDULE_NAMES, SPREADS, CASES))
    ]
    assert len(combinations) < 55
    ranks(size, body, combinations, timeout=120)


@pytest.mark.few(0, slow=5)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_combination(ranks: Ranks, name: str, size: int) -> None:
    ranks(size, body, list(itertools.product([name], SPREADS, CASES)), timeout=300)
