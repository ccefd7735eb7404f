"""Corrects operators on DTensors. On the right is what torch computes, unlike one process.

==========================================  =====================================================
means of losses                             a mean of the ranks' means, though some have fewer rows,
                                            or fewer that count; gradients of each rank's own mean
``any``                                     a sum of booleans, which as a number counts ranks
``fill_`` of what ranks hold summands of    every summand is the value
``logsumexp`` with ``keepdim``              is placed along the dim before the sharded one
``sum`` over no dims, which is over all     none is summed: in backward of ``amax`` and ``amin``
norms of parts, of which more is computed   sums, lists and gradients of each rank's own norm
convolutions of images that are sharded     of each rank's part alone
==========================================  =====================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.comm.dtensors.dtensor import is_replicated, local_of
from meshwright.comm.dtensors.gather_dtensor import held_boxes, whole
from meshwright.torch_internals.distributed import dtensor_handlers, without_handler
from meshwright.torch_internals.tensors import foreach_norm_operator, schema_of

_Operator = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]

_NONE, _MEAN, _SUM = range(3)
"""Values of ``reduction``, as torch's operators have it."""
_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


@functools.cache
def correct_operators() -> None:
    """Register the corrected operators for the whole process."""
    aten, handlers = torch.ops.aten, dtensor_handlers()
    for name in _LOSSES:
        handlers[getattr(aten, name).default] = _loss
        if hasattr(aten, f"{name}_backward"):
            handlers[getattr(aten, f"{name}_backward").default] = _loss_backward
    for name in ("nll_loss", "nll_loss2d"):
        handlers[getattr(aten, f"{name}_forward").default] = _likelihood
        handlers[getattr(aten, f"{name}_backward").default] = _likelihood_backward
    for operator in (aten.any.default, aten.any.dim, aten.any.dims):
        handlers[operator] = _any
    handlers[aten.fill_.Scalar] = handlers[aten.fill_.Tensor] = _fill
    handlers[aten.logsumexp.default] = _logsumexp
    handlers[aten.amax.default] = handlers[aten.amin.default] = _extreme
    for operator in (aten.linalg_vector_norm.default, foreach_norm_operator):
        handlers[operator] = _Norm(handlers.get(operator, without_handler))
    for operator in (aten.convolution.default, aten.convolution_backward.default):
        handlers[operator] = _Convolution(handlers.get(operator, without_handler))


def _named(op: _Operator, args: _Args, kwargs: _Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults for omitted ones."""
    arguments = schema_of(op).arguments
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return found | dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)


def _is_mean_of_parts(given: Mapping[str, Any]) -> bool:
    """Check whether the call takes a mean over tensors that are sharded."""
    tensors = [each for each in given.values() if isinstance(each, DTensor)]
    is_cut = any(not is_replicated(each) for tensor in tensors for each in tensor.placements)
    return given["reduction"] == _MEAN and is_cut


def _loss(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    if not _is_mean_of_parts(given):
        return without_handler(op, args, kwargs)
    return op(**given | {"reduction": _NONE}).mean()


def _loss_backward(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    found = without_handler(op, args, kwargs)
    # torch's is of the mean of this rank's elements. Scaled, since a sum may not fit in float16.
    if _is_mean_of_parts(given):
        found = found * (local_of(found).numel() / found.numel())
    return found


def _likelihood(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    if not _is_mean_of_parts(given):
        return without_handler(op, args, kwargs)
    rows, _ = op(**given | {"reduction": _NONE})
    _, weight = op(**given | {"reduction": _SUM})
    weight = _replicated(weight)
    exact = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(exact).sum() / weight.to(exact)).to(rows.dtype), weight


def _likelihood_backward(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    if not _is_mean_of_parts(given):
        return without_handler(op, args, kwargs)
    gradient = given["grad_output"] / given["total_weight"]
    return op(**given | {"grad_output": gradient, "reduction": _SUM})


def _any(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    found = without_handler(op, args, kwargs)
    return _replicated(found) if any(each.is_partial() for each in found.placements) else found


def _fill(op: _Operator, args: tuple[DTensor, Any], kwargs: _Kwargs) -> DTensor:
    tensor, value = args
    # torch has no rule for ``weight[0] = 1``, which fills with a tensor.
    value = whole(value) if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor) or value != 0:  # zeros are summands of zero, too
        held_boxes(tensor, "a DTensor that is filled")
    op(local_of(tensor).detach(), value)
    return tensor


def _logsumexp(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    if not given["keepdim"]:
        return without_handler(op, args, kwargs)
    found = op(given["self"], given["dim"])
    for dim in sorted(each % given["self"].ndim for each in given["dim"]):
        found = found.unsqueeze(dim)
    return found


def _extreme(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    if not _named(op, args, kwargs)["dim"]:
        _correct_sums()  # its backward sums over no dims, as next to nobody else does
    return without_handler(op, args, kwargs)


class _Norm:
    """A handler that gives every rank the full norms of sharded tensors."""

    __slots__ = ("before",)

    def __init__(self, before: _Operator) -> None:
        self.before = before

    def __call__(self, op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
        found = self.before(op, args, kwargs)
        order = _named(op, args, kwargs)["ord"]
        if isinstance(found, torch.Tensor):
            return _known(found, order)
        return _largest(found) if math.isinf(order) else [_known(each, order) for each in found]


def _known(norm: torch.Tensor, order: float) -> torch.Tensor:
    """Replicate a ``norm``, unless it is a number whose square may be summed later."""
    if not isinstance(norm, DTensor) or not any(each.is_partial() for each in norm.placements):
        return norm
    if norm.ndim or math.isinf(order):
        return _replicated(norm)
    _correct_sums()
    return norm


def _largest(norms: list[DTensor]) -> list[DTensor]:
    """Replicate ``norms``, numbers: one collective for those with the same placement."""
    found = list(norms)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, norm in enumerate(norms):
        if any(each.is_partial() for each in norm.placements):
            alike.setdefault((norm.dtype, norm.device_mesh, norm.placements), []).append(index)
    for (_, mesh, placements), indices in alike.items():
        rows = torch.stack([local_of(norms[index]) for index in indices])
        known = _replicated(DTensor.from_local(rows, mesh, placements, run_check=False))
        for index, row in zip(indices, local_of(known).unbind(), strict=True):
            whole_on = [Replicate()] * mesh.ndim
            found[index] = DTensor.from_local(row, mesh, whole_on, run_check=False)
    return found


def _correct_sums() -> None:
    """Handle sums by `_sum` from now on; this adds overhead to every sum."""
    aten, handlers = torch.ops.aten, dtensor_handlers()
    handlers[aten.sum.default] = handlers[aten.sum.dim_IntList] = _sum


def _sum(op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
    given = _named(op, args, kwargs)
    tensor = given["self"]
    if any(each.is_partial() and type(each) is not Partial for each in tensor.placements):
        given["self"] = _replicated(tensor)
    if "dim" in given:
        given["dim"] = given["dim"] or [*range(tensor.ndim)]
    return without_handler(op, (), given)


class _Convolution:
    """A handler that gathers its inputs, unless ranks hold whole images."""

    __slots__ = ("before",)

    def __init__(self, before: _Operator) -> None:
        self.before = before

    def __call__(self, op: _Operator, args: _Args, kwargs: _Kwargs) -> object:
        names = [argument.name for argument in schema_of(op).arguments]
        is_batch = all(
            is_replicated(each) or (each.is_shard(0) and name in ("input", "grad_output"))
            for name, value in zip(names, args, strict=False)
            if isinstance(value, DTensor)
            for each in value.placements
        )
        if is_batch:
            return self.before(op, args, kwargs)
        return op(*(_replicated(v) if isinstance(v, DTensor) else v for v in args), **kwargs)


def _replicated(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
