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
from torch.distributed.device_mesh import DeviceMesh

import meshwright as mw
from meshwright.comm import Communicator, communicator, subgroup
from meshwright.errors import CommunicationError
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from soak.footprint import Footprint
from soak.lifetimes import KINDS, mlp, rounds_of, train, use
from support.internals.timeline import Collective

both = pytest.mark.backends("shm", "gloo")

# ------------------------------------------------------------------ groups


@pytest.mark.few(1)
@both
def test_destroyed_groups_give_back_threads_descriptors_and_memory(ranks: Ranks) -> None:
    for measured, left in ranks(2, rounds_of, "groups", 30, timeout=200):
        assert left == {}
        assert_no_growth(measured, "groups")


def reduced_at_many_places() -> tuple[int, int]:
    """Tensors that are left of reductions of gradients, each at an address of its own."""
    world = communicator()
    kept = [torch.ones(1 << 17) for _ in range(12)]
    counts = []
    for tensors in (kept[:2], kept[2:]):
        for whole in tensors:
            world.reduce_scatter(torch.empty(whole.numel() // world.size), whole).wait()
            world.all_reduce(whole).wait()
        gc.collect()
        counts.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
    return counts[0], counts[1]


@both
def test_nothing_is_remembered_of_memory_that_was_reduced(ranks: Ranks) -> None:
    for first, last in ranks(2, reduced_at_many_places):
        # Of the twenty reductions a thread of the transport may still have the last.
        assert last < first + 5


def assert_no_growth(measured: list[Footprint], name: str) -> None:
    """A thread that is about to end, or one more piece of memory in a pool, is no growth."""
    before, after = measured[len(measured) // 3], measured[-1]
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


def body_models(rounds: int) -> dict[str, tuple[list[Footprint], dict[str, int]]]:
    return {kind: rounds_of(kind, rounds) for kind in KINDS}


@pytest.mark.few(1)
@both
def test_deleted_models_give_back_all_that_they_had(ranks: Ranks) -> None:
    for found in ranks(2, body_models, 8, timeout=200):
        for kind, (measured, left) in found.items():
            assert left == {}, kind
            assert_no_growth(measured, kind)


class Reductions:
    def __init__(self) -> None:
        self.count = 0

    def issued(self, collective: Collective) -> None:
        self.count += collective.kind == "all_reduce" and "bucket" in collective.label

    def completed(self, collective: Collective, start: object, end: object) -> None:
        pass


def body_after_the_wrapper() -> None:
    """A model that outlives its wrapper is plain again; a pass that was under way is reduced."""
    from meshwright.comm import observe

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


@pytest.mark.few(1)
@both
def test_a_model_outlives_its_wrapper(ranks: Ranks) -> None:
    ranks(2, body_after_the_wrapper)
