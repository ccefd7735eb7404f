"""DTensors that enter and leave code that computes on local tensors, with their gradients.

The gradient of a DTensor is a DTensor with the same placement, or Replicate for a Partial. The
caller does any communication. Each backward can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import distribute_module as distribute_module  # for styles
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshwright.comm.dtensors.dtensor import AnyPlacement, our_placement, torch_placements
from meshwright.layout import Partial, Placement, Replicate
from meshwright.torch_internals.tensors import local_tensor_of

Convert = Callable[[torch.Tensor, Placement, Placement, Sequence[int], bool], torch.Tensor]
"""``convert(local, found, wanted, shape, is_backward)``: a local tensor of a whole of ``shape``,
placed as wanted on a mesh of one dim."""

_SHARED = "_meshwright_entered"


def placement_on(tensor: torch.Tensor, mesh: DeviceMesh, name: str) -> Placement | None:
    """Return the placement of a DTensor on the 1-D ``mesh``; None for any other tensor.

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


def entered(tensor: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
    """Return this rank's part of a DTensor; its gradient becomes a DTensor again.

    ``partial``: on a 1-D mesh, each rank computes another part of the result from it, so its
    gradient is Partial. Such callers share one local tensor, whose gradients are summed before they
    become a DTensor. Not for leaves, which the kept tensor would keep alive.
    """
    if not partial:
        return _Enter.apply(tensor, None)
    local = vars(tensor).get(_SHARED)
    # One made under no_grad has no history, and one made outside of it would keep its graph.
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    if local is None or local.requires_grad is not is_recorded:
        local = _Enter.apply(tensor, [Partial()])
        vars(tensor)[_SHARED] = local
    return local


def left(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, Placement],
    shape: Sequence[int],
    convert: Convert,
) -> torch.Tensor:
    """Make a DTensor of global ``shape`` on ``mesh``, which has one dim.

    ``placements`` are those of ``local`` and of the DTensor. ``convert`` converts the first to the
    second, and a gradient of any placement to the gradient of ``local``, which is whole on each
    rank if ``local`` is a summand: each rank then uses another part of it.
    """
    return _Leave.apply(local, mesh, placements, tuple(shape), convert)


def wrapped(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[AnyPlacement], shape: Sequence[int]
) -> torch.Tensor:
    """Make a DTensor of global ``shape`` around ``local``, on a mesh of any dims.

    Raises ValueError in the backward for a gradient that is neither placed alike nor Replicate.
    """
    found = tuple(our_placement(placement, "result") for placement in placements)
    return _Wrap.apply(local, mesh, found, tuple(shape))


def _gradient_of(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, tensor: DTensor, back: Sequence[Placement] | None
    ) -> torch.Tensor:
        if back is None:
            back = [_gradient_of(our_placement(found, "input")) for found in tensor.placements]
        ctx.kept = tensor.device_mesh, back, tensor.shape  # pyrefly: ignore[missing-attribute]
        # A new object: autograd would give the DTensor's own local tensor a history.
        return local_tensor_of(tensor).view_as(local_tensor_of(tensor))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore[bad-override]
        mesh, placements, shape = ctx.kept  # pyrefly: ignore[missing-attribute]
        return wrapped(grad, mesh, placements, shape), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, Placement],
        shape: tuple[int, ...],
        convert: Convert,
    ) -> DTensor:
        own, wanted = placements
        ctx.kept = own, shape, convert  # pyrefly: ignore[missing-attribute]
        if own != wanted:
            local = convert(local, own, wanted, shape, False)
        return _dtensor(local, mesh, [wanted], shape)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        own, shape, convert = ctx.kept  # pyrefly: ignore[missing-attribute]
        if not isinstance(grad, DTensor):
            return grad, None, None, None, None
        found = our_placement(grad.placements[0], "gradient")
        if found == _gradient_of(own):
            # Where each rank has a summand, it continues with another part of what it is given.
            return _Enter.apply(grad, [own]), None, None, None, None
        return convert(entered(grad), found, own, shape, True), None, None, None, None


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
    ) -> DTensor:
        ctx.placements = placements  # pyrefly: ignore[missing-attribute]
        return _dtensor(local, mesh, placements, shape)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        if not isinstance(grad, DTensor):
            return grad, None, None, None
        own = ctx.placements  # pyrefly: ignore[missing-attribute]
        wanted = torch_placements([_gradient_of(each) for each in own])
        pairs = zip(grad.placements, wanted, strict=True)
        if any(found != want and not found.is_replicate() for found, want in pairs):
            raise ValueError(
                f"expected a gradient placed {list(wanted)}, found {list(grad.placements)}: "
                "redistribute the tensor before it is used"
            )
        # From Replicate to Shard is a slice.
        return _Enter.apply(grad.redistribute(placements=wanted), own), None, None, None


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    # Its strides are those of a whole tensor that is contiguous.
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.detach(),
        mesh,
        torch_placements(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


# ------------------------------- modules that compute on DTensors, by styles of torch's protocol

Layouts = Sequence[TorchPlacement]


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placed: Mapping[str, AnyPlacement], source: int | None
) -> None:
    """Convert the parameters of ``module`` itself to DTensors, Replicate by default.

    Values come from rank ``source`` of ``mesh``; None keeps each rank's own.
    """
    for key, given in module._parameters.items():
        if given is not None and not isinstance(given, DTensor):
            layouts = torch_placements([placed.get(key, Replicate())])
            whole = distribute_tensor(given.detach(), mesh, layouts, src_data_rank=source)
            module._parameters[key] = nn.Parameter(whole, requires_grad=given.requires_grad)


def enter(
    found: Layouts, wanted: Layouts, mod: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh
) -> DTensor:
    """Redistribute the first input to ``wanted``; a local tensor is placed as ``found``."""
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
    """Redistribute the first input to ``cut``; a local tensor already has that placement."""
    return enter(cut, cut, mod, inputs, mesh)


def leave_sequence(
    is_local: bool, mod: nn.Module, outputs: DTensor, mesh: DeviceMesh
) -> torch.Tensor:
    """Keep the output's placement; returns its local part if ``is_local``."""
    return outputs.to_local() if is_local else outputs
