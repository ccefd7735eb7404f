"""DTensors that enter and leave what computes on local tensors, with their gradients.

The gradient of a DTensor is a DTensor; it is placed as the tensor, or Replicate where that is
Partial. One dim of a mesh; nothing here sends anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensor import our_placement, torch_placements
from meshwright.layout import Partial, Placement, Replicate

__all__ = ["Convert", "entered", "left", "placement_on"]

Convert = Callable[[torch.Tensor, Placement, Placement, Sequence[int]], torch.Tensor]
"""``convert(local, found, wanted, shape)``: the local tensor of a gradient of the whole ``shape``,
placed as wanted."""


def placement_on(tensor: torch.Tensor, mesh: DeviceMesh, name: str) -> Placement | None:
    """How a DTensor is placed on ``mesh``, which has one dim; None for any other tensor.

    Raises ValueError for a DTensor of another mesh; ``name`` says where it was found.
    """
    if not isinstance(tensor, DTensor):
        return None
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"{name}: expected a DTensor on {mesh}, found one of shape {tuple(tensor.shape)} on "
            f"{tensor.device_mesh}: pass the local tensor, or redistribute it first"
        )
    return our_placement(tensor.placements[0], name)


def entered(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; its gradient goes back as one."""
    return _Enter.apply(tensor)


def left(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placement: Placement,
    shape: Sequence[int],
    convert: Convert,
) -> torch.Tensor:
    """A DTensor of global ``shape`` around ``local``; ``convert`` places its gradient as it."""
    return _Leave.apply(local, mesh, placement, tuple(shape), convert)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: DTensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        found = our_placement(tensor.placements[0], "input")
        placement = Replicate() if isinstance(found, Partial) else found
        ctx.kept = tensor.device_mesh, placement, tensor.shape  # pyrefly: ignore[missing-attribute]
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        mesh, placement, shape = ctx.kept  # pyrefly: ignore[missing-attribute]
        return _Leave.apply(grad, mesh, placement, shape, _as_it_is)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placement: Placement,
        shape: tuple[int, ...],
        convert: Convert,
    ) -> DTensor:
        ctx.kept = placement, shape, convert  # pyrefly: ignore[missing-attribute]
        # Its strides are those of a whole tensor that is contiguous.
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local.view_as(local),
            mesh,
            torch_placements([placement]),
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        placement, shape, convert = ctx.kept  # pyrefly: ignore[missing-attribute]
        wanted = Replicate() if isinstance(placement, Partial) else placement
        if not isinstance(grad, DTensor):
            return grad, None, None, None, None
        found = our_placement(grad.placements[0], "gradient")
        local = entered(grad)
        if found != wanted:
            local = convert(local, found, wanted, shape)
        return local, None, None, None, None


def _as_it_is(
    local: torch.Tensor, found: Placement, wanted: Placement, shape: Sequence[int]
) -> torch.Tensor:
    return local
