"""Copies of `DistributedDataParallel`: averaged models, files, and training that goes on there."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from meshwright.comm import Recorder, communicator, observe, subgroup
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    keep_batch_norm_local,
    replicate,
)
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.in_backward import apply_in_backward


def net() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    keep_batch_norm_local(norm)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 2)).double()


def share(step: int) -> torch.Tensor:
    world = communicator()
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
    return whole.chunk(world.size)[world.rank]


def train(model: nn.Module, first: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + 2):
        optimizer.zero_grad()
        model(share(step)).square().mean().backward()
        optimizer.step()


def equal_on_all_ranks(model: nn.Module) -> None:
    for parameter in model.parameters():
        everyone = torch.empty(communicator().size, parameter.numel(), dtype=torch.float64)
        communicator().all_gather(everyone, parameter.detach().flatten()).wait()
        assert torch.equal(everyone[0], everyone[-1])


def body_average() -> None:
    model = DistributedDataParallel(net())
    recorder = Recorder()
    train(model, 0)
    with observe(recorder):
        average = AveragedModel(model)
        average.update_parameters(model)
        if communicator().rank == 0:
            with torch.no_grad():
                average.eval()(share(0))
    assert recorder.collectives == []
    before = copy.deepcopy(model.state_dict())
    train(model, 2)
    average.update_parameters(model)
    # `AveragedModel` shares no memory with its model, and has the mean of both states.
    for name, value in model.module.named_parameters():
        mean = (before[f"module.{name}"] + value.detach()) / 2
        torch.testing.assert_close(average.module.module.get_parameter(name).detach(), mean)


def body_goes_on() -> None:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    train(model, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    train(model, 2)
    for other in copies:
        assert other.gradient_as_bucket_view
        assert other.require_backward_grad_sync
        train(other, 2)
        equal_on_all_ranks(other)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert mine is not theirs
            assert torch.equal(mine, theirs)


def body_not_copied() -> None:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, allreduce_hook)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other(share(0))
    with pytest.raises(RuntimeError, match="communication hook, which no copy has"):
        other(share(0))
    other.register_comm_hook(None, allreduce_hook)
    train(model, 0)
    train(other, 0)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    world = communicator()
    everyone = subgroup(world, [list(world.ranks)], "all").group
    grouped = DistributedDataParallel(net(), process_group=everyone)
    train(copy.deepcopy(grouped), 0)
    mesh = init_device_mesh("cpu", (world.size,))
    meshed = DistributedDataParallel(net(), device_mesh=mesh)
    assert meshed.device_mesh is mesh
    train(copy.deepcopy(meshed), 0)
    for each in (grouped, meshed):
        with pytest.raises(RuntimeError, match="^DDP Pickling/Unpickling are only supported"):
            torch.save(each, io.BytesIO())


def body_device_ids() -> None:
    train(replicate(net(), device_ids=None), 0)
    train(replicate(net(), device_ids=[]), 0)
    wrong: Any
    for wrong, text in (([0, 1], "contain a single element"), ([0], "only work with modules")):
        with pytest.raises(ValueError, match=text):
            replicate(net(), device_ids=wrong)


def body_steps_in_the_backward(options: dict[str, Any]) -> None:
    """Optimizers that torch lets step in the backward step by the mean, and free the gradient."""

    def built(wrap: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(3, 3)).double()
        inner.forward = lambda x: inner[1](inner[0](x))
        apply_in_backward(torch.optim.SGD, inner[:2].parameters(), {"lr": 0.1, "momentum": 0.9})
        return inner, wrap(inner)

    one, _ = built(lambda model: model)
    inner, model = built(lambda model: DistributedDataParallel(model, **options))
    for step in range(3):
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
        one(whole).square().mean().backward()
        model(share(step)).square().mean().backward()
        assert all(parameter.grad is None for parameter in inner.parameters())
        for mine, theirs in zip(inner.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with model.no_sync():
        model(share(0)).square().mean().backward()
    assert inner[0].weight.grad is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_steps_in_the_backward(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(2, body_steps_in_the_backward, options)


def body_parts_and_files() -> None:
    """Slices are containers of the class before; what belongs to this process is not pickled."""
    one = net().eval()
    mesh = init_device_mesh("cpu", (2,))
    for wrap in (replicate, fully_shard, FullyShardedDataParallel):
        model = net().eval()
        for part in range(3) if wrap is fully_shard else ():
            wrap(model[part], mesh=mesh)
        model = wrap(model)
        torch.testing.assert_close(model(share(0)), one(share(0)))
        if wrap is not FullyShardedDataParallel:
            assert type(model[0:2]) is nn.Sequential
            torch.testing.assert_close(model[0:2](share(0)), one[0:2](share(0)))
        for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(TypeError, match="cannot pickle a .*Save its state_dict"):
                save(model)
        torch.testing.assert_close(copy.copy(model)(share(0)), one(share(0)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "body", [body_parts_and_files, body_average, body_goes_on, body_not_copied, body_device_ids]
)
def test_copies(ranks: Ranks, body: Any) -> None:
    ranks(2, body)
