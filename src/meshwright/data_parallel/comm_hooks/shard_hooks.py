"""Communication hooks for sharded and hybrid units, with the same buckets as for replicas.

A hook ``hook(state, bucket)`` replaces an all-reduce. Where it runs depends on the axes::

    axes                 bucket holds                         over         before and after
    replicate            the whole gradients                  replicate
    replicate x shard    this rank's part of their means      replicate    reduce-scatter first
    shard                the whole gradients                  shard        cut to this rank's part

So with hybrid sharding PowerSGD compresses the shards (as matrices under `fully_shard`), on the
slow axis only. On a shard axis alone a hook moves whole gradients, more than a reduce-scatter.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from meshwright.data_parallel.replicas.gradient_bucket import (
    BucketPart,
    GradBucket,
    RegisteredHook,
    check_hook,
    tensor_of,
)
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import InternalError


def register_bucket_hook(units: Sequence[Unit], state: object, hook: object) -> None:
    """Have ``hook`` reduce the gradients of ``units``, which are in forward order.

    Raises TypeError or ValueError for an invalid hook, RuntimeError for a second one.
    """
    registered = RegisteredHook(hook=check_hook(hook), state=state)
    if any(unit.settings.reduce_hook is not None for unit in units):
        raise RuntimeError(
            "register_comm_hook can only be called once. Combine the hooks into one function"
        )
    index = 0
    for unit in units:
        # The unit holds this in its settings, so a strong reference back would be a cycle.
        reduce_hook = partial(_reduce_unit, registered, weakref.ref(unit), index)
        unit.change(reduce_hook=reduce_hook)
        index += len(unit.groups)


def _reduce_unit(
    registered: RegisteredHook,
    reference: weakref.ref[Unit],
    first: int,
    whole: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Reduce the buffer ``whole`` of a unit's group by a hook; ``out`` gets this rank's part."""
    unit = reference()
    if unit is None:
        raise InternalError("a hook was called for a unit that is gone")
    number = next(n for n, g in enumerate(unit.groups) if g.in_hook is whole)
    group, index = unit.groups[number], first + number
    axes, label = group.axes, f"reduce {unit.name}"
    if axes.shard is None or axes.replicate is None:
        axis = axes.shard or axes.replicate
        if axis is not None:
            parts = [part for rank in range(axes.parts) for part in _parts(group, rank)]
            _call(registered, GradBucket(whole, parts, axis, index=index, label=label))
        if axes.shard is not None:
            out.copy_(whole.view(axes.parts, -1)[axes.part])
        return
    axes.shard.reduce_scatter(out, whole, label=label).wait()
    out.div_(axes.parts)
    own = [p._replace(offset=p.offset - axes.part * len(out)) for p in _parts(group, axes.part)]
    label = f"replicate {unit.name}"
    _call(registered, GradBucket(out, own, axes.replicate, index=index, label=label))


def _call(registered: RegisteredHook, bucket: GradBucket) -> None:
    line = bucket.buffer()
    found = tensor_of(registered.call(bucket)).view(-1)
    if found.data_ptr() != line.data_ptr() or found.dtype != line.dtype:
        line.copy_(found)


def _parts(group: ParameterGroup, rank: int) -> list[BucketPart]:
    """List the parts of shard ``rank`` in the whole buffer: chunks, or flat ranges when packed."""
    layout, slots = group.buffer.layout, group.slots
    start = rank * layout.shard_size
    return [
        BucketPart(
            slots[cut.index].leaf,
            start + cut.offset,
            cut.shape if layout.parts > 1 else layout.shapes[cut.index],
        )
        for cut in layout.cuts(rank)
    ]
