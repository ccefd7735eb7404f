"""Derivatives of DTensors that are moved: those of one process, of each order."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import differentiate_moves


def placed(x: torch.Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    """Make a DTensor of ``x``, a whole tensor that is known on all ranks."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[placement])


def to_and_fro(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Move ``x`` between layouts, with an operator under each."""
    rows = placed(x, mesh, Shard(0)).redistribute(placements=[Shard(1)]).cos()
    return rows.redistribute(placements=[Replicate()]).to_local()


def by_hand(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Compute a product of rows by summands that are made of local tensors."""
    left = placed(x, mesh, Shard(1)).to_local().sin()
    summand = left @ placed(x.t(), mesh, Shard(0)).to_local()
    summed = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).cos().to_local()


MOVES = {
    "from_local of summands": by_hand,
    "full_tensor": lambda x, mesh: placed(x, mesh, Shard(0)).cos().full_tensor(),
    "redistribute": to_and_fro,
    "to_local": lambda x, mesh: placed(x, mesh, Replicate()).cos().to_local(),
    "full_tensor of summands": lambda x, mesh: (
        placed(x, mesh, Shard(1)) @ placed(x.t(), mesh, Shard(0))
    ).full_tensor(),
}
PLAIN: dict[str, Any] = {
    "from_local of summands": lambda x: (x.sin() @ x.t()).cos(),
    "full_tensor of summands": lambda x: x @ x.t(),
}


def slopes(function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Compute the first four derivatives, each along ``x``."""
    x = x.clone().requires_grad_()
    value, found = function(x).sin().square().sum(), []
    for _ in range(4):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(slope.detach())
        value = (slope * x.detach()).sum()
    return found


def body() -> None:
    differentiate_moves()
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3).mul(0.07)
    for name, move in MOVES.items():
        expected = slopes(PLAIN.get(name, torch.cos), x)
        found = slopes(lambda x, move=move: move(x, mesh), x)
        for order, (mine, one) in enumerate(zip(found, expected, strict=True), 1):
            torch.testing.assert_close(mine, one, msg=f"{name}: derivative {order}")


def test_every_order_is_that_of_one_process(ranks: Ranks) -> None:
    ranks(2, body)
