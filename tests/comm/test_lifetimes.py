"""Groups that are destroyed and models that are deleted give back all that they had."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshwright as mw
from meshwright.axes import Axes
from meshwright.comm import Communicator, communicator, subgroup
from meshwright.comm.process_groups import union
from meshwright.composition import parallelize
from meshwright.errors import CommunicationError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.pipelining import PipelineStage, get_schedule_class
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import MODELS, Ranks
from meshwright.timeline import Collective
from soak.footprint import Footprint, footprint, objects

CPU = torch.device("cpu")
both = pytest.mark.backends("shm", "gloo")

# ------------------------------------------------------------------ groups


def use(axis: Communicator) -> None:
    """A bit of everything that keeps threads, descriptors or memory."""
    axis.all_reduce(torch.ones(100_000)).wait()
    axis.gather_bytes(b"abc", label="some bytes")
    axis.empty_shared(1000, torch.float32)
    there = (axis.rank + 1) % axis.size
    received = torch.zeros(5)
    transfers = [axis.send(torch.ones(5), there), axis.recv(received, there)]
    for pending in transfers:
        pending.wait()
    axis.all_reduce(torch.ones(3)).works[0].get_future().then(lambda future: None).wait()


def one_group(number: int) -> None:
    group = dist.new_group([0, 1])
    axis = communicator(group, f"axis {number % 3}")
    use(axis)
    assert union([communicator(), axis]).size == 2
    dist.barrier()
    dist.destroy_process_group(group)


def body_groups(rounds: int) -> tuple[Footprint, Footprint]:
    before = footprint()
    for number in range(rounds):
        one_group(number)
        if number == rounds // 3:
            before = footprint()
    return before, footprint()


@both
def test_destroyed_groups_give_back_threads_descriptors_and_memory(ranks: Ranks) -> None:
    for before, after in ranks(2, body_groups, 30, timeout=200):
        assert_no_growth(before, after)


def assert_no_growth(before: Footprint, after: Footprint, name: str = "") -> None:
    """A thread that is about to end, or one more piece of memory in a pool, is no growth."""
    assert after.threads <= before.threads + 2, (name, before, after)
    assert after.descriptors <= before.descriptors + 2, (name, before, after)
    assert after.mappings <= before.mappings + 8, (name, before, after)


def told_after_the_end(group: dist.ProcessGroup, axis: Communicator) -> list[str]:
    """What whoever still has a destroyed group and its communicator is told."""
    told = []
    tensor, model = torch.ones(2), mw.replicate(nn.Linear(2, 1), process_group=group)
    model(torch.ones(1, 2)).sum().backward()
    use(axis)
    communicator().barrier()
    dist.destroy_process_group(group)
    calls: list[Callable[[], Any]] = [
        lambda: axis.all_reduce(tensor),
        lambda: axis.barrier(),
        lambda: axis.send(tensor, 1 - axis.rank),
        lambda: axis.gather_bytes(b"x", label="x"),
        lambda: axis.group,
        lambda: axis.empty_shared(3, torch.float32),
        lambda: model(torch.ones(1, 2)).sum().backward(),
    ]
    for call in calls:
        with pytest.raises(CommunicationError) as error:
            call()
        told.append(str(error.value))
    assert not axis.is_open
    return told


def body_after_the_end() -> list[str]:
    world, ranks_of_one = communicator(), [[0], [1]]
    before = subgroup(world, ranks_of_one, "mine")
    dist.destroy_process_group(before.group)
    again = subgroup(world, ranks_of_one, "mine")
    assert again.is_open and not before.is_open and again != before
    group = dist.new_group([0, 1])
    alive, axis = weakref.ref(group), communicator(group, "mine")
    told = told_after_the_end(group, axis)
    del group
    gc.collect()
    assert alive() is None
    with pytest.raises(CommunicationError, match="which this rank has destroyed"):
        axis.barrier()
    return told


@both
def test_a_communicator_whose_group_was_destroyed_says_so(ranks: Ranks) -> None:
    for told in ranks(2, body_after_the_end):
        for text in told:
            assert "communicates over process group" in text
            assert "of ranks [0, 1], which this rank has destroyed" in text
        assert told[0].startswith("axis mine ")


# ------------------------------------------------------------------ models


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def train(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_once(model: nn.Module) -> list[nn.Parameter]:
    train(model)
    model(torch.ones(4, 16)).sum().backward()
    return list(model.parameters())


def replicated(group: Any) -> None:
    train(mw.replicate(mlp(), process_group=group))


def wrapped(group: Any) -> None:
    train(mw.DistributedDataParallel(mlp(), process_group=group))


def sharded(group: Any) -> None:
    model = mlp()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model[0], model[2], model):
        mw.fully_shard(layer, mesh=mesh)
    train(model)


def sharded_by_the_class(group: Any) -> None:
    model = mlp()
    model[2] = FullyShardedDataParallel(model[2], process_group=group)
    train(FullyShardedDataParallel(model, process_group=group))


def piped(group: Any) -> None:
    rank, model = dist.get_rank(), mlp()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, CPU, group=group)
    schedule = get_schedule_class("1F1B")(
        stage, 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.ones(8, 16))
        else:
            schedule.step(target=torch.ones(8, 4))


def cut(group: Any) -> None:
    # Torch's own DTensors do not survive the group of a mesh that equals a later one.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = mlp()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    alone = subgroup(communicator(), [[0], [1]], "alone").group
    wrapper = mw.DistributedDataParallel(model, process_group=alone)
    train(wrapper)
    del wrapper
    gc.collect()
    assert all(p.grad is not None for p in trained_once(model))


def planned(group: Any, **axes: int) -> None:
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


def body_meshes() -> None:
    """Not even torch's own DTensors survive the group of a mesh that equals a later one."""
    for match in ("which this rank has destroyed", "a process group of DeviceMesh.* was destroyed"):
        group, model = dist.new_group([0, 1]), mlp()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if match.startswith("which"):
            train(model)
        communicator().barrier()
        dist.destroy_process_group(group)
        with pytest.raises(CommunicationError, match="which this rank has destroyed"):
            train(model)


def test_what_lies_on_a_mesh_of_a_destroyed_group_says_so(ranks: Ranks) -> None:
    ranks(2, body_meshes)


KINDS: dict[str, Callable[[Any], None]] = {
    "replicate": replicated,
    "DistributedDataParallel": wrapped,
    "fully_shard": sharded,
    "FullyShardedDataParallel": sharded_by_the_class,
    "pipeline": piped,
    "parallelize_module": cut,
    "Trainable, replicate": lambda group: planned(group, replicate=2),
    "Trainable, shard": lambda group: planned(group, shard=2),
    "Trainable, pipeline": lambda group: planned(group, pipeline=2),
}


def body_models(rounds: int) -> dict[str, tuple[Footprint, Footprint, dict[str, int]]]:
    """Of each kind: what there was after a third of the rounds, at the end, and more objects."""
    found = {}
    for name, build in KINDS.items():
        before = footprint(), objects()
        for number in range(rounds):
            group = dist.new_group([0, 1])
            build(group)
            gc.collect()
            communicator().barrier()
            dist.destroy_process_group(group)
            del group
            if number == rounds // 3:
                before = footprint(), objects()
        more = objects() - before[1]
        found[name] = before[0], footprint(), dict(more)
    return found


@both
def test_deleted_models_give_back_all_that_they_had(ranks: Ranks) -> None:
    for found in ranks(2, body_models, 8, timeout=200):
        for name, (before, after, more) in found.items():
            assert more == {}, name
            assert_no_growth(before, after, name)


class Reductions:
    def __init__(self) -> None:
        self.count = 0

    def issued(self, collective: Collective) -> None:
        self.count += collective.kind == "all_reduce" and "bucket" in collective.label

    def completed(self, collective: Collective, start: object, end: object) -> None:
        pass


def body_after_the_wrapper() -> None:
    """A model that outlives its wrapper is plain again; a pass that was under way is reduced."""
    from meshwright.comm.registry import observe

    rank = dist.get_rank()
    net, inputs = mlp(), torch.full((2, 16), 1.0 + rank)
    seen = Reductions()
    with observe(seen):
        for _ in range(3):
            wrapper = mw.DistributedDataParallel(net)
            output = wrapper(inputs)
            del wrapper
            gc.collect()
            output.sum().backward()
            reduced = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            net.zero_grad()
            del output
            gc.collect()
    per_pass, rest = divmod(seen.count, 3)
    assert (per_pass, rest) == (1, 0), "one wrapper reduces, not those before it"
    net(inputs).sum().backward()
    mine = [p.grad for p in net.parameters() if p.grad is not None]
    whole = [p.clone() for p in mine]
    for gradient in whole:
        dist.all_reduce(gradient)
    for total, mean in zip(whole, reduced, strict=True):
        torch.testing.assert_close(total / 2, mean)
    assert not torch.equal(mine[0], reduced[0])


@both
def test_a_model_outlives_its_wrapper(ranks: Ranks) -> None:
    ranks(2, body_after_the_wrapper)
