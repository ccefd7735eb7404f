"""Data parallelism inside a stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.comm import Recorder, communicator, observe, subgroup
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.pipelining.residency import find_residency
from meshwright.schedule.builders import stage_ranks
from meshwright.testing import Ranks

NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def body_torch_ddp(name: str) -> None:
    """Two pipelines of two ranks; each stage is wrapped by torch's class over its replicas."""
    world = communicator()
    pipeline = subgroup(world, [[0, 1], [2, 3]], "pipeline")
    data = subgroup(world, [[0, 2], [1, 3]], "replicate")
    kind = get_schedule_class(name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    count = 4 if is_multi else 2
    layers: list[nn.Module] = []
    for seed in range(count):
        torch.manual_seed(seed)
        layers.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double())
    ones = copy.deepcopy(layers)
    holders = stage_ranks(2, count, "v" if "V" in name else "loop")
    mine = [s for s, r in enumerate(holders) if r == pipeline.rank]
    stages = [
        PipelineStage(
            DistributedDataParallel(layers[s], process_group=data.group),
            s,
            count,
            torch.device("cpu"),
            group=pipeline.group,
        )
        for s in mine
    ]
    schedule = kind(stages if is_multi else stages[0], 8, loss_fn=nn.MSELoss())
    torch.manual_seed(9)
    x, target = torch.randn(2, 32, 6, dtype=torch.float64)
    share, goal = x.chunk(2)[data.rank], target.chunk(2)[data.rank]
    nn.MSELoss()(nn.Sequential(*ones)(x), target).backward()
    args = (share,) if 0 in mine else ()
    kwargs = {"target": goal} if count - 1 in mine else {}
    for times in (1, 2):
        with observe(recorder := Recorder()):
            schedule.step(*args, **kwargs)
        kinds = [kind for kind, _ in recorder.kinds() if kind == "all_reduce"]
        assert len(kinds) == len(mine)
        for s in mine:
            for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
                torch.testing.assert_close(a.grad, times * b.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_replicas_of_torch_are_one_process(ranks: Ranks, name: str) -> None:
    ranks(4, body_torch_ddp, name)


def test_what_cannot_be_driven_is_refused(ranks: Ranks) -> None:
    def body() -> None:
        for wrap in (mw.replicate, mw.fully_shard, mw.DistributedDataParallel):
            inner = wrap(nn.Linear(2, 2))
            with pytest.raises(TypeError, match="which schedules cannot drive yet"):
                find_residency(nn.Sequential(nn.ReLU(), inner))
        foreign = torch.distributed.fsdp.fully_shard(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="'0' of a pipeline stage is sharded by torch's FSDPM"):
            find_residency(nn.Sequential(foreign))

    ranks(2, body)


def test_a_plain_module_needs_nothing() -> None:
    found = find_residency(nn.Sequential(nn.Linear(2, 2)))
    assert not found
    found.begin()
    found.unshard()
    found.finish()
