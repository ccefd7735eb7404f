"""Training on ranks with simulated devices: values of one process, and no access unordered."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import comm
from meshwright.comm import Pending, communicator
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.testing import Ranks, RanksFailed, on_devices
from meshwright.testing.simulated import DEVICE
from support.internals.testing import connected_device


class Block(nn.Module):
    """A layer with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def net() -> nn.Module:
    """Three blocks and what is read from them, in float64."""
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(6, 3)).double()


def shard(model: nn.Module) -> nn.Module:
    for block in list(model.children())[:3]:
        fully_shard(block)
    return fully_shard(model)


def wrap(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": lambda model: replicate(model, bucket_cap_mb=0.0001),
    "fully_shard": shard,
    "class": wrap,
}


def train(model: nn.Module, rows: slice, steps: int) -> list[float]:
    """Train on some rows of each batch, and list the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x, target = torch.randn(8, 6).double()[rows], torch.randn(8, 3).double()[rows]
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def body(way: str) -> None:
    world = communicator()
    assert world.device == DEVICE
    one, many = net(), WAYS[way](copy.deepcopy(net()))
    expected = train(one, slice(0, 8), 3)
    share = 8 // world.size
    found = train(many, slice(world.rank * share, (world.rank + 1) * share), 3)
    means = torch.tensor(found).double()
    world.all_reduce(means).wait()
    torch.testing.assert_close((means / world.size).tolist(), expected, rtol=1e-6, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trains_as_one_process_with_nothing_unordered(ranks: Ranks, size: int, way: str) -> None:
    on_devices(ranks)(size, body, way)


WAIT = Pending.wait


def unwaited(pending: Pending, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Stand for a wait, and let no stream wait: what it needs ends on the host alone."""
    if pending.communicator.is_on_host:
        return WAIT(pending, *args, **kwargs)
    for work in pending.works:
        while not work._job.ended.wait(0.01):
            pass
    return pending._value


def body_without_waits(way: str) -> None:
    comm.Pending.wait = unwaited
    body(way)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_missing_wait_is_named(ranks: Ranks, way: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        on_devices(ranks)(2, body_without_waits, way)
    text = str(failed.value)
    assert re.search(
        r"unordered: .* of group 0 on the stream of group 0 .* waits for nothing", text
    )


def body_mixed() -> None:
    world = communicator()
    token = torch.ones(2)
    with pytest.raises(ValueError, match="communicates on cpu:0, found a tensor on cpu: move"):
        world.all_reduce(token.cpu())
    world.all_reduce(token).wait()
    assert token.tolist() == [world.size] * 2


def test_a_tensor_of_the_host_is_refused(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_mixed)


def body_beside_a_gpu() -> None:
    here = torch.accelerator
    gpu = torch.device("cuda")
    with (
        patch.object(here, "is_available", lambda: True),
        patch.object(torch.cuda, "is_available", lambda: True),  # what torch 2.11 asks
        patch.object(here, "current_accelerator", lambda check_available=False: gpu),
    ):
        with connected_device():
            for shape in ((2, 1), (1, 2)):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
                assert [communicator(mesh.get_group(name)).size for name in "ab"] == list(shape)
        assert here.is_available()


def test_groups_of_a_mesh_are_simulated_where_the_machine_has_a_gpu(ranks: Ranks) -> None:
    ranks(2, body_beside_a_gpu, connected=False)
