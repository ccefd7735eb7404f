"""torch's operators on lists that mix DTensors and plain tensors.

Clipping, and optimizers with ``foreach`` or ``fused``, pass all their tensors to one operator, and
torch rejects DTensors beside plain tensors, or on two meshes. Here the list is split::

    [plain, DTensor on (tensor), plain]    the operator on [plain, plain], then on [DTensor]
    a stack of their norms                 each a plain number of the whole tensor
    a fused step of SGD or Adagrad, and
    _foreach_copy_                         on each rank's parts: torch has none for DTensors

A plain tensor counts as replicated.

Where another operator rejects a DTensor beside a plain tensor, `explain_reads` may explain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensors.sharded_axes import local_part
from meshwright.torch_internals.distributed import dtensor_handlers, without_handler
from meshwright.torch_internals.tensors import operator_names, without_rules
from meshwright.torch_internals.trees import tree_leaves

_Operator = Callable[..., Any]
_READS = (
    *("addmm", "baddbmm", "bmm", "convolution", "copy_", "embedding", "index.Tensor", "linear"),
    *("matmul", "mm", "mul.Tensor", "mv", "native_layer_norm"),
)
"""The operators by which programs read parameters, or load them; each costs a second dispatch."""


def take_lists_apart() -> None:
    """Split mixed lists, for the whole process. Lists on one mesh pay one check per tensor."""
    if are_lists_taken_apart():
        return
    handlers, stack = dtensor_handlers(), torch.ops.aten.stack.default
    handlers[stack] = _ListOperator(handlers.get(stack), _stacked)
    for name in operator_names():
        kind, _, overload = name.removeprefix("aten::").partition(".")
        if kind.startswith(_OF_LISTS) and "out" not in overload:
            operator = getattr(getattr(torch.ops.aten, kind), overload or "default")
            handlers[operator] = _ListOperator(handlers.get(operator), _one_by_one)


def are_lists_taken_apart() -> bool:
    return isinstance(dtensor_handlers().get(torch.ops.aten.stack.default), _ListOperator)


_OF_LISTS = ("_foreach_", "_fused_ada", "_fused_sgd", "_amp_foreach_")


class _ListOperator:
    """A handler that calls torch's own, unless its first list is on several meshes."""

    __slots__ = ("apart", "before")

    def __init__(self, before: _Operator | None, apart: _Operator) -> None:
        self.before = before
        self.apart = apart

    def __call__(self, op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        meshes = {getattr(tensor, "device_mesh", None) for tensor in args[0]}
        if len(meshes) > 1:
            return self.apart(op, args, kwargs)
        return (self.before or without_handler)(op, args, kwargs)


def _on_parts(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call ``op``, which is element-wise, with this rank's parts."""
    for changed, other in zip(*args[:2], strict=True):
        lies, beside = (getattr(each, "placements", None) for each in (changed, other))
        if lies != beside:
            raise RuntimeError(
                f"{op}: a tensor of shape {tuple(changed.shape)} lies as {lies or 'a plain one'}, "
                f"and what is to change it as {beside or 'a plain one'}: redistribute that before"
            )
    lists = [each for each in args if isinstance(each, Sequence)]
    op(*([*map(local_part, each)] for each in lists), *args[len(lists) :], **kwargs)


for _operator in without_rules:
    for _overload in _operator.overloads():
        dtensor_handlers().setdefault(getattr(_operator, _overload), _on_parts)


def _one_by_one(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    count = len(args[0])
    found: list[Any] = [None] * count
    result: object = None
    for indices in _by_mesh(args[0]):
        result = op(*(_picked(each, indices, count) for each in args), **kwargs)
        if isinstance(result, Sequence) and len(result) == len(indices):
            for index, value in zip(indices, result, strict=True):
                found[index] = value
    return found if isinstance(result, Sequence) else result


def _stacked(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Stack numbers of whole tensors; one collective for each mesh."""
    tensors = args[0]
    if any(tensor.ndim for tensor in tensors):
        raise RuntimeError(
            "aten.stack.default got mixed torch.Tensor and DTensor, or DTensors of several meshes, "
            f"of shape {tuple(tensors[0].shape)}: only numbers can be stacked so. Call "
            "full_tensor() of the DTensors, or distribute all tensors on one mesh"
        )
    found: list[torch.Tensor] = list(tensors)
    for indices in _by_mesh(tensors):
        if isinstance(tensors[indices[0]], DTensor):
            stacked = cast("DTensor", torch.stack([tensors[index] for index in indices]))
            whole = stacked.full_tensor()
            for index, value in zip(indices, whole.unbind(), strict=True):
                found[index] = value
    return op(found, *args[1:], **kwargs)


def _by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of tensors on each mesh, meshes in order of first appearance."""
    found: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(index)
    return list(found.values())


def _picked(value: Any, indices: Sequence[int], count: int) -> Any:  # noqa: ANN401
    """Select the entries of one argument that belong to the tensors at ``indices``."""
    is_list = isinstance(value, Sequence) and len(value) == count
    return [value[index] for index in indices] if is_list else value


@functools.cache
def explain_reads(why: Callable[[object, Sequence[object]], RuntimeError | None]) -> None:
    """From now on raise ``why``'s error, if any, where a read mixes DTensors and plain tensors."""
    handlers = dtensor_handlers()
    for name in _READS:
        kind, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, kind), overload or "default")
        before = handlers.get(operator, without_handler)
        handlers[operator] = functools.partial(_explained, before, why)


def _explained(
    before: _Operator, why: _Operator, op: _Operator, args: object, kwargs: Mapping[str, Any]
) -> object:
    try:
        return before(op, args, kwargs)
    except RuntimeError as error:
        is_mixed = "got mixed torch.Tensor and DTensor" in str(error)
        found = why(op, tree_leaves((args, dict(kwargs)))) if is_mixed else None
        if found is None:
            raise
        raise found from error
