"""Higher derivatives of redistributed DTensors.

torch computes the gradients of `redistribute`, `full_tensor`, `to_local` and `from_local`. Which of
these gradients can be differentiated again depends on the release (in 2.11 none): second and third
derivatives through the others are silently wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.torch_internals.distributed import (
    FromTorchTensor,
    Redistribute,
    ToTorchTensor,
    global_tensor_info,
)

_BACKWARD = "backward"
_Gradient = Callable[[Any, Any], torch.Tensor]


@functools.cache
def differentiate_moves() -> None:
    """Make the gradients of redistributed DTensors differentiable, for the whole process."""
    ways: tuple[tuple[Any, _Gradient], ...] = (
        (Redistribute, _redistributed),
        (ToTorchTensor, _from_local),
        (FromTorchTensor, _to_local),
    )
    for move, again in ways:
        setattr(move, _BACKWARD, staticmethod(functools.partial(_backward, move.backward, again)))


def _backward(once: Callable[..., Any], again: _Gradient, ctx: Any, gradient: Any) -> Any:  # noqa: ANN401
    """Backward of a placement operator: torch's own ``once``, unless its gradient needs a graph."""
    if gradient is None or not gradient.requires_grad or not torch.is_grad_enabled():
        return once(ctx, gradient)
    return (again(ctx, gradient), *[None] * (len(ctx.needs_input_grad) - 1))


def _redistributed(ctx: Any, gradient: DTensor) -> torch.Tensor:  # noqa: ANN401
    """Redistribute a gradient back to the original layout, in torch's dtypes."""
    lies, dtype = ctx.current_spec, gradient.dtype
    computed = _first_of(ctx, "bwd_op_dtype", "backward_dtype", "original_dtype")
    returned = _first_of(ctx, "bwd_out_dtype", "original_dtype")
    # A whole gradient of summands stays whole.
    placements = [
        Replicate() if target.is_partial() and not current.is_partial() else target
        for current, target in zip(gradient.placements, lies.placements, strict=True)
    ]
    moved: Any = gradient if computed == dtype else gradient.to(computed)
    moved = moved.redistribute(placements=placements)
    found: torch.Tensor = moved if returned == computed else moved.to(returned)
    return found


def _first_of(ctx: Any, *names: str) -> torch.dtype:  # noqa: ANN401
    """Return the first attribute that exists: releases of torch use other names."""
    found = (getattr(ctx, name, None) for name in names)
    dtype: torch.dtype = next(value for value in found if value is not None)
    return dtype


def _from_local(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    lies = ctx.dtensor_spec
    placements = ctx.grad_placements or _whole(lies.placements)
    _, stride = global_tensor_info(gradient, lies.mesh, lies.placements)
    found: torch.Tensor = DTensor.from_local(
        gradient, lies.mesh, placements, run_check=False, shape=lies.shape, stride=tuple(stride)
    )
    return found


def _to_local(ctx: Any, gradient: DTensor) -> torch.Tensor:  # noqa: ANN401
    given = ctx.forward_input_placements
    placements = getattr(ctx, "grad_placements", None) or _whole(given)
    # Of a summand's gradient, which is whole, each rank makes a summand again.
    again = [
        own if own.is_partial() else placement
        for own, placement in zip(given, placements, strict=True)
    ]
    moved: Any = gradient.redistribute(placements=placements)
    local: torch.Tensor = moved.to_local(grad_placements=again)
    return local


def _whole(placements: Iterable[Placement]) -> list[Placement]:
    """List the placements of a gradient: Replicate where its tensor is Partial."""
    return [Replicate() if placement.is_partial() else placement for placement in placements]
