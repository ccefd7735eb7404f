"""Modules whose parameters and activations are DTensors, as under styles of torch's protocol.

For styles that are built from the parts of torch's styles, or change some of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import distribute_module as distribute_module  # for styles
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshwright.comm.dtensors.dtensor import AnyPlacement, torch_placements
from meshwright.layout import Replicate

Layouts = Sequence[TorchPlacement]


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placed: Mapping[str, AnyPlacement], source: int | None
) -> None:
    """Make DTensors of the parameters of ``module`` itself, replicated where ``placed`` says none.

    Values are those of rank ``source`` of ``mesh``; None takes those that are there.
    """
    for key, given in module._parameters.items():
        if given is not None and not isinstance(given, DTensor):
            layouts = torch_placements([placed.get(key, Replicate())])
            whole = distribute_tensor(given.detach(), mesh, layouts, src_data_rank=source)
            module._parameters[key] = nn.Parameter(whole, requires_grad=given.requires_grad)


def enter(
    found: Layouts, wanted: Layouts, mod: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh
) -> DTensor:
    """Redistribute the first input to ``wanted``; one that is local is placed as ``found``."""
    x = inputs[0]
    given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, found, run_check=False)
    return given.redistribute(placements=wanted)


def leave(
    wanted: Layouts, is_local: bool, mod: nn.Module, outputs: DTensor, mesh: DeviceMesh
) -> torch.Tensor:
    """Redistribute the output to ``wanted``; returns its local part if ``is_local``."""
    moved = outputs.redistribute(placements=wanted)
    return moved.to_local() if is_local else moved


def enter_sequence(
    cut: Layouts, mod: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh
) -> DTensor:
    """Redistribute the first input to ``cut``; one that is local is placed so already."""
    return enter(cut, cut, mod, inputs, mesh)


def leave_sequence(
    is_local: bool, mod: nn.Module, outputs: DTensor, mesh: DeviceMesh
) -> torch.Tensor:
    """Leave the output as it is placed; returns its local part if ``is_local``."""
    return outputs.to_local() if is_local else outputs
