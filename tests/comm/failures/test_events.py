"""What ranks ask each other, where the run is watched only after some of them were made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks

TEACHERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "class": mw.FullyShardedDataParallel,
    "fully_shard": mw.fully_shard,
    "replicate": mw.replicate,
    "DDP": mw.DistributedDataParallel,
}
BATCH = torch.arange(16, dtype=torch.float64).view(4, 4)


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return nn.Linear(4, 4).double(), student.double()


def loss_of(teacher: nn.Module, student: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = teacher(x)
    return (student(x) - wanted).square().mean()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("teacher", "is_first"), [*((name, True) for name in TEACHERS), ("class", False)]
)
def test_a_model_of_all_ranks_trains_beside_one_of_two_axes(
    ranks: Ranks, teacher: str, is_first: bool
) -> None:
    def body() -> tuple[float, list[torch.Tensor]]:
        dist.init_process_group("cpu:meshwright")
        frozen, student = models()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if is_first:
            frozen = TEACHERS[teacher](frozen)
        mw.parallelize_module(student, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mw.fully_shard(student, mesh=mesh["dp"])
        if not is_first:
            frozen = TEACHERS[teacher](frozen)
        x = BATCH[2 * mesh.get_local_rank("dp") :][:2]
        losses = [loss_of(frozen, student, x) for _ in range(2)]
        losses[1].backward()
        found = [p.grad.full_tensor() for p in student.parameters()]
        return losses[1].item(), found

    frozen, student = models()
    expected = loss_of(frozen, student, BATCH)
    expected.backward()
    results = ranks(4, body, connected=False)
    assert (results[0][0] + results[2][0]) / 2 == pytest.approx(expected.item())
    for _, found in results:
        for gradient, parameter in zip(found, student.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
