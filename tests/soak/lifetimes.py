"""Groups that are destroyed and models that are deleted, hundreds of times: nothing stays.

Run it as ``python tests/soak/lifetimes.py [--groups 1000] [--rounds 50]``, with src and tests on
PYTHONPATH. Two ranks, on both backends. Memory, descriptors and threads may grow by less than 1 %
in the last four fifths; free pages between what a rank holds are given back before it is measured.
Exits with status 1 when they do, or when an object of a model that was deleted is still there.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshwright as mw
from meshwright.comm import Communicator, communicator, subgroup
from meshwright.comm.process_groups import union
from meshwright.composition import parallelize
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.pipelining import PipelineStage, get_schedule_class
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import MODELS, ranks
from soak.footprint import LIMIT, Footprint, footprint, give_back, growth, objects
from soak.table import Table
from support.internals.axes import Axes

__all__ = ["KINDS", "mlp", "one_group", "rounds_of", "train", "use"]

POINTS = 10

# ------------------------------------------------------------------ groups


def use(axis: Communicator) -> None:
    """Do a bit of everything that keeps threads, descriptors or memory."""
    axis.all_reduce(torch.ones(100_000)).wait()
    axis.gather_bytes(b"abc", label="some bytes")
    axis.empty_shared(1000, torch.float32)
    there = (axis.rank + 1) % axis.size
    received = torch.zeros(5)
    for pending in (axis.send(torch.ones(5), there), axis.recv(received, there)):
        pending.wait()
    axis.all_reduce(torch.ones(3)).works[0].get_future().then(lambda future: None).wait()


def one_group(number: int = 0) -> None:
    """Make a group, use it under two names, and destroy it."""
    group = dist.new_group([0, 1])
    axis = communicator(group, f"axis {number % 3}")
    use(axis)
    assert union([communicator(), axis]).size == 2
    dist.barrier()
    dist.destroy_process_group(group)


# ------------------------------------------------------------------ models


def mlp() -> nn.Sequential:
    """The same small model on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


def train(model: nn.Module) -> None:
    """Take two steps, and leave gradients behind."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()


def _replicated(group: Any) -> None:
    train(mw.replicate(mlp(), process_group=group))


def _wrapped(group: Any) -> None:
    train(mw.DistributedDataParallel(mlp(), process_group=group))


def _sharded(group: Any) -> None:
    model = mlp()
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (model[0], model[2], model):
        mw.fully_shard(part, mesh=mesh)
    train(model)


def _sharded_by_the_class(group: Any) -> None:
    model = mlp()
    model[2] = FullyShardedDataParallel(model[2], process_group=group)
    train(FullyShardedDataParallel(model, process_group=group))


def _piped(group: Any) -> None:
    rank, model = dist.get_rank(), mlp()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = get_schedule_class("1F1B")(
        stage, 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.ones(8, 16))
        else:
            schedule.step(target=torch.ones(8, 4))


def _cut(group: Any) -> None:
    # Torch's own DTensors do not survive the group of a mesh that equals a later one.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = mlp()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    alone = subgroup(communicator(), [[0], [1]], "alone").group
    wrapper = mw.DistributedDataParallel(model, process_group=alone)
    train(wrapper)
    del wrapper
    gc.collect()
    train(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def _planned(group: Any, **axes: int) -> None:
    sample = MODELS["sequential"]
    pipeline = PipelinePlan(microbatches=2) if "pipeline" in axes else PipelinePlan()
    plan = Plan(axes=Axes.of(axes), pipeline=pipeline, train=TrainPlan(clip_norm=0.5))
    inputs, targets = sample.example_batch(8, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    trainable = parallelize(
        sample.build(),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss=sample.loss,
        example=(inputs,),
    )
    share = 8 // trainable.data_size
    mine = slice(trainable.data_rank * share, (trainable.data_rank + 1) * share)
    for _ in range(2):
        trainable.step(inputs[mine], targets[mine])


KINDS: dict[str, Callable[[Any], None]] = {
    "replicate": _replicated,
    "DistributedDataParallel": _wrapped,
    "fully_shard": _sharded,
    "FullyShardedDataParallel": _sharded_by_the_class,
    "pipeline": _piped,
    "parallelize_module": _cut,
    "Trainable, replicate": lambda group: _planned(group, replicate=2),
    "Trainable, shard": lambda group: _planned(group, shard=2),
    "Trainable, pipeline": lambda group: _planned(group, pipeline=2),
}
"""Build a model on a group of two ranks and train it."""


# ------------------------------------------------------------------ measured


def rounds_of(kind: str, rounds: int) -> tuple[list[Footprint], dict[str, int]]:
    """Make and lose groups, or models: footprints at equal distances, and objects that stayed."""
    found: list[Footprint] = []
    known = objects()
    for number in range(rounds):
        if kind == "groups":
            one_group(number)
        else:
            group = dist.new_group([0, 1])
            KINDS[kind](group)
            gc.collect()
            communicator().barrier()
            dist.destroy_process_group(group)
            del group
        if number == rounds // 2:
            known = objects()
        if (number + 1) % max(1, rounds // POINTS) == 0:
            give_back()
            found.append(footprint())
    return found, dict(objects() - known)


def check(kind: str, backend: str, rounds: int) -> tuple[str, str]:
    """Run one kind; what to show, and what grew or stayed."""
    results = ranks(2, rounds_of, kind, rounds, timeout=120 + 2 * rounds, backend=backend)
    grown = [growth(measured) for measured, _ in results]
    most = {what: max(row[what] for row in grown) for what in grown[0]}
    shown = f"{results[0][0][-1]}; grown by " + ", ".join(f"{v:.2%} {k}" for k, v in most.items())
    problems = [f"{what} grew by {part:.2%}" for what, part in most.items() if part >= LIMIT]
    problems += [f"{more} {name} stayed" for _, left in results for name, more in left.items()]
    return shown, ", ".join(problems)


def main() -> int:
    """Run groups and all models on both backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--backends", default="shm,gloo")
    given = parser.parse_args()
    title = f"{given.groups} groups, {given.rounds} models of each kind, on 2 ranks"
    table = Table(title, ["rank 0 at the end; growth of any rank"])
    for backend in given.backends.split(","):
        table.row(f"groups, {backend}", partial(check, "groups", backend, given.groups))
        for kind in KINDS:
            table.row(f"{kind}, {backend}", partial(check, kind, backend, given.rounds))
    return table.end()


if __name__ == "__main__":
    raise SystemExit(main())
