"""What styles of torch's protocol do: modules whose parameters and activations are DTensors.

For styles of others that are built of the helpers of torch's styles, or change some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshwright.comm.dtensors.dtensor import AnyPlacement, torch_placements
from meshwright.layout import Replicate

Partition = Callable[[str, nn.Module, DeviceMesh], None]
Hook = Callable[[nn.Module, Any, DeviceMesh], Any]


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placed: Mapping[str, AnyPlacement], source: int | None
) -> None:
    """Make DTensors of the parameters of ``module`` itself, replicated where ``placed`` says none.

    Values are those of rank ``source`` of ``mesh``; None takes those that are there.
    """
    for key, given in module._parameters.items():
        if given is not None and not isinstance(given, DTensor):
            placements = torch_placements([placed.get(key, Replicate())])
            whole = distribute_tensor(given.detach(), mesh, placements, src_data_rank=source)
            module._parameters[key] = nn.Parameter(whole, requires_grad=given.requires_grad)


def as_dtensor(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    found: Sequence[TorchPlacement],
    wanted: Sequence[TorchPlacement],
) -> torch.Tensor:
    """Bring a tensor to ``wanted``. A local one is placed as ``found``, a DTensor says so itself."""
    given = tensor
    if not isinstance(given, DTensor):
        given = DTensor.from_local(given, mesh, found, run_check=False)
    return given.redistribute(placements=wanted)


def given_out(tensor: Any, wanted: Sequence[TorchPlacement], *, is_local: bool) -> torch.Tensor:  # noqa: ANN401
    """Bring a DTensor to ``wanted`` for whoever called the module, local if ``is_local``."""
    moved = tensor.redistribute(placements=wanted)
    return moved.to_local() if is_local else moved


def run_on_dtensors(
    module: nn.Module, mesh: DeviceMesh, partition: Partition, enter: Hook, leave: Hook
) -> nn.Module:
    """Have ``module`` compute on DTensors, with hooks for its inputs and outputs."""
    return distribute_module(module, mesh, partition, enter, leave)
