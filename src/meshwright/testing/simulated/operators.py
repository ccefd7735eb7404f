"""What an operator reads, writes and makes, and whether the host waits for it, by its schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshwright.torch_internals.simulation import parts_of_sparse
from meshwright.torch_internals.tensors import OpOverload, schema_of, storage_id

_ALLOCATES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_TOUCHES_NOTHING = frozenset(
    {
        *("_unsafe_view", "_reshape_alias", "_reshape_copy", "lift_fresh", "set_", "resize_"),
        *("is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "dim"),
        *("is_pinned", "_has_compatible_shallow_copy_type", "is_set_to", "detach_", "t_"),
        *("squeeze_", "unsqueeze_", "transpose_", "as_strided_", "swapdims_", "swapaxes_"),
    }
)
_OF_GROUPS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_ON_LISTS = "aten::_foreach_"
_STOPS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy"),
        *("masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount"),
        *("unique_dim_consecutive", "argwhere", "_assert_async_and_wait"),
    }
)
"""Operators whose result, or its size, the host must read."""
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


@dataclass(frozen=True, slots=True)
class Uses:
    """The tensors that one operator call uses."""

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    makes: list[torch.Tensor] = field(default_factory=list)
    stops: bool = False
    like: list[torch.Tensor] = field(default_factory=list)
    """Tensors that it does not read, but on whose device it makes others."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts about an overload, the same for all its calls."""

    written: tuple[bool, ...]
    """For each argument of the schema."""
    names: tuple[str, ...]
    is_view: bool
    is_silent: bool
    allocates: bool
    stops: bool
    indexes: bool


def calls_a_group(func: OpOverload) -> bool:
    """Check whether ``func`` runs a collective, which reports its own reads and writes."""
    return schema_of(func).name.startswith(_OF_GROUPS)


@cache
def _kind_of(func: OpOverload) -> _Kind:
    schema = schema_of(func)
    name = schema.name.split("::")[-1]
    written = tuple(bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments)
    aliased = [r.alias_info for r in schema.returns]
    is_view = not any(written) and any(info is not None and not info.is_write for info in aliased)
    return _Kind(
        written=written,
        names=tuple(a.name for a in schema.arguments),
        is_view=is_view,
        is_silent=name in _TOUCHES_NOTHING,
        allocates=name in _ALLOCATES,
        stops=name in _STOPS,
        indexes=name in _INDEXING,
    )


def uses_of(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
) -> Uses:
    """Find what the call that returned ``result`` reads, writes and makes."""
    kind = _kind_of(func)
    if kind.is_view or kind.is_silent:
        return Uses()
    uses = Uses(stops=kind.stops)
    given = [*args, *(kwargs.get(name) for name in kind.names[len(args) :])]
    known: set[int] = set()
    for value, is_written in zip(given, kind.written, strict=False):
        for tensor in tensors_in(value):
            known.add(storage_id(tensor.untyped_storage()))
            (uses.writes if is_written else uses.reads).append(tensor)
    for tensor in tensors_in(result):
        if storage_id(tensor.untyped_storage()) not in known:
            uses.makes.append(tensor)
    if kind.allocates:
        return Uses(makes=uses.makes, like=uses.reads)
    if kind.indexes and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(given[1])):
        return Uses(uses.reads, uses.writes, uses.makes, stops=True)
    return uses


def is_unversioned(func: OpOverload) -> bool:
    """Check for a foreach operator, whose writes raise no version under a dispatch mode."""
    kind = _kind_of(func)
    return any(kind.written) and schema_of(func).name.startswith(_ON_LISTS)


def lacks_memory(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_view: bool
) -> bool:
    """Check whether a call (of a view operator, if ``is_view``) uses a tensor with freed memory."""
    kind = _kind_of(func)
    if kind.is_view is not is_view or kind.is_silent or kind.allocates:
        return False
    given = (*args, *kwargs.values())
    return any(
        tensor.numel() and not tensor.untyped_storage().nbytes()
        for value in given
        for tensor in tensors_in(value)
    )


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of an argument: in lists too, and the parts of sparse tensors."""
    if is_uninitialized(value):
        return
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            if value.device.type != "meta":
                yield value
        elif value.layout is torch.sparse_coo:
            yield from parts_of_sparse(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def is_uninitialized(value: object) -> bool:
    """Check for a parameter or buffer of a lazy module whose shape is not known yet."""
    return isinstance(value, UninitializedParameter | UninitializedBuffer)
