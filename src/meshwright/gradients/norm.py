"""One norm over all gradients and all axes, and clipping by it.

Each element of the gradients counts once. If some parameters are sharded over ``shard`` and
``tensor``, and others over one of these axes or none, the ranks of both axes sum::

    sharded over        each rank sums the powers of   counted on
    shard, tensor       its own elements               all ranks of both axes
    tensor              its own elements               the first rank of axis shard
    nothing             all elements                   the first rank of both axes

One number is reduced over the union of these axes, so all its ranks get the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from meshwright.comm import Communicator, LateNumbers, union
from meshwright.comm.dtensors.gradient_part import refuse_waiting
from meshwright.comm.dtensors.sharded_axes import (
    check_meshes,
    is_distributed,
    local_part,
    spread_of,
)
from meshwright.comm.streams import is_host
from meshwright.gradients.bits import zero_unless
from meshwright.gradients.finite import (
    UNTOUCHED,
    ZEROED,
    NonFiniteValues,
    agree_on_non_finite,
    non_finite_gradients,
)
from meshwright.gradients.optimizers import refuse_stages
from meshwright.torch_internals.tensors import foreach_mul_, foreach_norm

NORM_ROW = 65536
"""Elements whose norm is taken at once: longer sums in float32 lose digits on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadGradients:
    """Gradients sharded over ``communicators``.

    Without communicators every rank holds the whole, as after an all-reduce.
    """

    gradients: tuple[torch.Tensor, ...]
    communicators: tuple[Communicator, ...] = ()
    dtype: torch.dtype = torch.float32
    """The norm is at least this wide, also on a rank without a gradient here."""


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns the old norm.

    It equals the norm in one process, for any mix of plain parameters, flat shards and DTensors:
    parts of a gradient are summed over the axes that shard it, and a replicated or shared gradient
    counts once. Every rank calls this with the same parameters in the same order; a gradient may be
    None on some. The norm is a plain tensor on the gradients' device, bitwise equal on all ranks;
    there is one reduction over all sharding axes.

    Raises RuntimeError, naming the first rank and parameter, when the norm is not finite and
    ``error_if_nonfinite`` is set. For gradients on a device, which are then zeroed, it is raised in
    the next call for the same ranks, or before a state is returned. Raises ValueError for a
    negative ``max_norm`` or a ``norm_type`` that is not positive; `LayoutError` for DTensors that
    cannot be combined, and for parameters of a pipeline's stages: use
    `meshwright.pipelining.clip_grad_norm_`.

    >>> clip_grad_norm_(model, 1.0)
    >>> clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
    """
    if max_norm < 0:
        raise ValueError(f"expected max_norm >= 0, found {max_norm}")
    if isinstance(parameters, nn.Module):
        named = list(parameters.named_parameters())
    else:
        listed = (parameters,) if isinstance(parameters, torch.Tensor) else parameters
        named = [(f"parameter {number}", each) for number, each in enumerate(listed)]
    refuse_stages(parameter for _, parameter in named)
    spread = group_by_spread(parameter for _, parameter in named)
    norm = global_norm(spread, norm_type)
    held = [gradient for group in spread for gradient in group.gradients]
    if error_if_nonfinite and is_host(norm.device):
        require_finite_norm(norm, norm_type, named, _axes_of(spread))
    elif error_if_nonfinite:
        _look_late(norm, norm_type, named, _axes_of(spread))
    scale_to_norm(held, norm, max_norm)
    if error_if_nonfinite and not is_host(norm.device):
        zero_unless(norm.isfinite(), held)
    return norm


def require_finite_norm(
    norm: torch.Tensor,
    norm_type: float,
    named: Iterable[tuple[str, torch.Tensor]],
    over: Communicator | None,
) -> None:
    """Raise RuntimeError when ``norm`` is not finite, naming the first rank and parameter of all.

    The ranks of ``over`` call it together, with the same norm and their own parameters.
    """
    if not math.isfinite(norm.item()):
        _refuse(norm.item(), norm_type, non_finite_gradients(named), over, UNTOUCHED)


def _look_late(
    norm: torch.Tensor,
    norm_type: float,
    named: Iterable[tuple[str, torch.Tensor]],
    over: Communicator | None,
) -> None:
    """Check as `require_finite_norm` does, for a norm on a device, once the host has it."""
    key = f"the norm over {'one rank' if over is None else over.name}"
    late = LateNumbers.known(key)
    if late.coming:
        late.settle()  # of the step before
    values = NonFiniteValues()
    held = [(n, local_part(p.grad)) for n, p in reversed(list(named)) if p.grad is not None]
    if held:
        values.look(held[0][1], lambda: held)

    def judge(numbers: list[float]) -> None:
        if not math.isfinite(numbers[0]):
            _refuse(numbers[0], norm_type, values.names(), over, ZEROED)

    late.look(norm.reshape(1), judge)


def _refuse(
    norm: float, norm_type: float, names: Sequence[str], over: Communicator | None, harm: str
) -> NoReturn:
    what = f"the gradient norm of order {norm_type} is {norm}, so gradients cannot be clipped"
    found = [f"the gradient of {name!r}" for name in names]
    if over is not None:
        raise RuntimeError(str(agree_on_non_finite(over, found, what=what, harm=harm)))
    who = f": {found[0]} is not finite" if found else ", although every element is finite"
    late = "" if harm == UNTOUCHED else f"{harm}. "
    raise RuntimeError(f"{what}{who}. {late}Find what overflows, or pass error_if_nonfinite=False")


def group_by_spread(parameters: Iterable[torch.Tensor]) -> list[SpreadGradients]:
    """List this rank's parts of gradients of ``parameters``, grouped by the axes that shard them.

    Groups and order depend on the parameters alone, so they are equal on all ranks even where a
    gradient is None. A parameter that occurs twice counts once.
    """
    once = list({id(parameter): parameter for parameter in parameters}.values())
    check_meshes(once)
    groups: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    dtypes: dict[tuple[Communicator, ...], torch.dtype] = {}
    for parameter in once:
        gradient = parameter.grad
        communicators = spread_of(parameter)
        if gradient is not None and is_distributed(gradient):
            communicators = spread_of(gradient)  # a plain one lies as its parameter does
        group = groups.setdefault(communicators, [])
        if gradient is not None and gradient.is_sparse:
            # Each row once, or parts of a sum would count as if they stood alone.
            parameter.grad = gradient.coalesce()
            group.append(parameter.grad.values())
        elif gradient is not None:
            refuse_waiting(gradient)
            group.append(local_part(gradient))
        known = dtypes.get(communicators, torch.float32)
        dtypes[communicators] = torch.promote_types(known, parameter.dtype.to_real())
    return [
        SpreadGradients(
            gradients=tuple(gradients), communicators=communicators, dtype=dtypes[communicators]
        )
        for communicators, gradients in groups.items()
    ]


def global_norm(spread: Sequence[SpreadGradients], norm_type: float = 2.0) -> torch.Tensor:
    """Compute the norm of all gradients together, over all axes, as a 0-dim tensor.

    Every rank of the axes calls it with groups over the same axes, in the same order. One number is
    reduced, or two for the maximum norm. Raises ValueError for an order that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0, found {norm_type}")
    parts = [_local_norm(group.gradients, norm_type) for group in spread]
    over = _axes_of(spread)
    if over is None:
        if len(parts) <= 1:
            return parts[0] if parts else torch.zeros((), device="cpu")
        return _norm_of_norms(parts, norm_type)
    widest = functools.reduce(
        torch.promote_types,
        [*(p.dtype for p in parts), *(group.dtype.to_real() for group in spread)],
    )
    # Powers of a float32 norm overflow where the norm itself does not.
    counted = [
        part.to(over.device, torch.float64)
        for part, group in zip(parts, spread, strict=True)
        if _counts_here(group, over) and group.gradients  # all ranks ask, even those without any
    ]
    # Something to stack on ranks that count nothing: they take part in the reduction, too.
    none = torch.zeros((), dtype=torch.float64, device=over.device)
    norm = torch.linalg.vector_norm(torch.stack([none, *counted]), norm_type)
    if math.isinf(norm_type):
        # The maximum of a NaN and a number is the number on some backends.
        is_nan = norm.isnan()
        both = torch.stack([norm.masked_fill(is_nan, 0.0), is_nan.double()])
        over.all_reduce(both, reduction="max", label="gradient norm").wait()
        return both[0].masked_fill(both[1] > 0, math.nan).to(widest)
    power = norm.pow(norm_type)
    over.all_reduce(power, label="gradient norm").wait()
    return power.pow(1.0 / norm_type).to(widest)


def _axes_of(spread: Sequence[SpreadGradients]) -> Communicator | None:
    """The ranks of all axes that shard a gradient; None if each rank holds all elements."""
    axes: list[Communicator] = []
    for group in spread:
        axes += group.communicators
    return union(axes) if axes else None


def _counts_here(group: SpreadGradients, over: Communicator) -> bool:
    """Whether this rank counts ``group``: the ranks that share it with the first rank do."""
    if not group.communicators:
        return over.rank == 0
    return over.ranks[0] in union(group.communicators).ranks


@torch.no_grad()
def scale_to_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply ``gradients`` in place by ``max_norm / norm`` where that is less than one."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Not on a device, where the host would wait for the number: gradients are multiplied by one.
    if is_host(coefficient.device) and coefficient.item() == 1.0:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, group in by_device.items():
        foreach_mul_(group, coefficient.to(device))


@torch.no_grad()
def _local_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    norms: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.numel() > NORM_ROW and gradient.is_contiguous():
            rows = gradient.numel() // NORM_ROW
            flat = gradient.view(-1)
            whole = flat[: rows * NORM_ROW].view(rows, NORM_ROW)
            wide = torch.float32 if gradient.dtype.itemsize < 4 else None
            rows_norm = torch.linalg.vector_norm(whole, norm_type, dim=1, dtype=wide)
            norms.append(torch.linalg.vector_norm(rows_norm, norm_type))
            gradient = flat[rows * NORM_ROW :]
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (_, dtype), group in by_kind.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms.extend(foreach_norm(group, norm_type, dtype=wide))
    if not norms:
        return torch.zeros((), device="cpu")
    return _norm_of_norms(norms, norm_type)


def _norm_of_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Compute the norm of 0-dim ``norms`` on the first one's device, in their widest dtype."""
    device, widest = norms[0].device, norms[0].dtype
    for norm in norms:
        if norm.dtype.itemsize > widest.itemsize:
            widest = norm.dtype
    return torch.linalg.vector_norm(torch.stack([n.to(device, widest) for n in norms]), norm_type)
