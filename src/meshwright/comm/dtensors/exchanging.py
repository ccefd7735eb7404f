"""Modules over whose mesh samples travel: experts.

Each rank of the mesh holds some rows of the module's parameters (DTensors, ``Shard(0)``), and
computes with the samples of all its ranks. So a gradient of these parameters is a sum over the
ranks of the mesh already, where that of any other parameter is this rank's summand.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_MESH = "_meshwright_exchanged_over"


def exchange_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Note that ``module`` exchanges samples over ``mesh``, which has one dim."""
    vars(module)[_MESH] = mesh


def exchanged_over(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which ``module`` exchanges samples, or None."""
    return getattr(module, _MESH, None)
