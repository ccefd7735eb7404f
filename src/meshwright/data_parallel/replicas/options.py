"""The options of `replicate` and `DistributedDataParallel`, as given and after checks.

::

    keywords              those that both take, with their values
        | resolved        checked against the module and each other, before any collective
    ReplicateOptions      frozen; names instead of objects, sizes in bytes
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from meshwright.data_parallel.replicas.low_precision import LowPrecision
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.modules import IGNORED_NAMES

AXIS = "replicate"
"""The name of the axis when no mesh names it."""

UnusedGradient = Literal["none", "zeros"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionSettings:
    """The settings of buckets and of their reduction."""

    first_bytes: int = 2**20
    """The first bucket of a dtype is closed at this size."""
    cap_bytes: int = 25 * 2**20
    """Every later bucket is closed at this size."""
    is_gradient_view: bool = False
    """Leave ``.grad`` as a view of the bucket: saves one copy and the memory of the gradients."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are summed; that of each parameter when None."""
    is_watched: bool = False
    """Look for values that are not finite before they are mixed with those of other ranks."""
    stops_on_non_finite: bool = False
    """Raise on every rank at the end of a backward pass that has found one; `is_watched` too."""
    listed_bytes: tuple[int, ...] = ()
    """The buckets' sizes one by one, instead of first and cap."""
    alone_bytes: int = 4 * 2**20
    """A gradient of this size or more is reduced in its own memory, unless it is a view; on devices
    only where a bucket would hold it alone."""
    delayed: frozenset[str] = frozenset()
    """Names of parameters that are reduced after the bucket of ``trigger``."""
    trigger: str | None = None
    """The parameter that delayed ones wait for; all others when None."""
    is_static: bool = False
    """Every iteration uses the same parameters: checked, see `StaticGraph`."""
    skips_unused: bool = False
    """Parameters that no rank used in the first reduction have no place in later ones."""
    sparse: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are sparse."""
    zeros_for_unused: bool = False
    """True when a parameter that no rank used gets zeros; its ``.grad`` is left alone otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateOptions:
    """The user's options, checked."""

    process_group: Any = None
    mesh: DeviceMesh | None = None
    """The mesh that ``process_group`` is of, if any."""
    axis: str = AXIS
    ignored: frozenset[nn.Module] = frozenset()
    """Modules whose parameters and buffers are left alone."""
    ignored_names: frozenset[str] = frozenset()
    """Parameters and buffers that are left alone."""
    device_ids: tuple[int | torch.device, ...] | None = None
    init_sync: bool = True
    init_buffers: bool = True
    """True when the set-up gives ranks the buffers of rank 0, where it gives them parameters."""
    broadcast_buffers: bool = True
    mixed_precision: LowPrecision | None = None
    reduction: ReductionSettings = field(default_factory=ReductionSettings)


def resolved(
    module: nn.Module,
    keywords: Mapping[str, Any],
    *,
    ignored: Collection[nn.Module] = (),
    device_ids: Sequence[int | torch.device] | None = None,
    wrong_mesh: Exception,
) -> ReplicateOptions:
    """Check the options in ``keywords`` for ``module``, and build `ReplicateOptions`.

    Raises RuntimeError for both a group and a mesh, ``wrong_mesh`` for a mesh with more than one
    dim, and ValueError for values out of range or that exclude each other.
    """
    group, axis = _axis_of(keywords, wrong_mesh)
    precision = keywords["mixed_precision"]
    older, newer = keywords["broadcast_buffers"], keywords["forward_sync_buffers"]
    return ReplicateOptions(
        process_group=group,
        mesh=keywords["device_mesh"],
        axis=axis,
        ignored=frozenset(ignored),
        ignored_names=frozenset(getattr(module, IGNORED_NAMES, ())),
        device_ids=tuple(device_ids) if device_ids else None,
        init_sync=keywords["init_sync"],
        init_buffers=newer is not None or older is not False,
        broadcast_buffers=(older if newer is None else newer) is not False,
        mixed_precision=precision,
        reduction=_reduction(module, keywords, precision),
    )


def _reduction(
    module: nn.Module, keywords: Mapping[str, Any], precision: LowPrecision | None
) -> ReductionSettings:
    asked = keywords["bucket_cap_mb"]
    listed = tuple(keywords["bucket_cap_mb_list"] or ())
    cap = 25 if asked is None else asked
    if min(cap, *listed, cap) <= 0:
        raise ValueError(
            f"expected bucket sizes above 0 MiB, found bucket_cap_mb={asked}, "
            f"bucket_cap_mb_list={listed}"
        )
    unused = keywords["unused_gradient"]
    if unused not in ("none", "zeros"):
        raise ValueError(f'expected unused_gradient="none" or "zeros", found {unused!r}')
    trigger, delayed = _delayed(module, keywords)
    return ReductionSettings(
        first_bytes=int(min(1, cap) * 2**20),
        cap_bytes=int(cap * 2**20),
        is_gradient_view=keywords["gradient_as_bucket_view"],
        reduce_dtype=None if precision is None else precision.reduce_dtype,
        listed_bytes=tuple(int(size * 2**20) for size in listed),
        delayed=delayed,
        trigger=trigger,
        is_static=keywords["static_graph"],
        skips_unused=keywords["skip_all_reduce_unused_params"],
        zeros_for_unused=unused == "zeros",
        is_watched=keywords["stop_on_non_finite"],
        stops_on_non_finite=keywords["stop_on_non_finite"],
    )


def _axis_of(keywords: Mapping[str, Any], wrong_mesh: Exception) -> tuple[Any, str]:
    group, mesh = keywords["process_group"], keywords["device_mesh"]
    if mesh is None:
        return group, AXIS
    if group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Pass the mesh alone"
        )
    if mesh.ndim != 1:
        raise wrong_mesh
    names = mesh.mesh_dim_names
    return mesh.get_group(), names[0] if names else AXIS


def _delayed(module: nn.Module, keywords: Mapping[str, Any]) -> tuple[str | None, frozenset[str]]:
    """Return the name of the awaited parameter, and the names of those that wait for it."""
    asked = keywords["delay_all_reduce_named_params"]
    trigger = keywords["param_to_hook_all_reduce"]
    if (asked is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time. Give both or neither"
        )
    if asked is None or trigger is None:
        return None, frozenset()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    delayed = dict(asked)
    for name, parameter in [("param_to_hook_all_reduce", trigger), *delayed.items()]:
        if id(parameter) not in names:
            raise ValueError(
                f"expected parameters of the {type(module).__name__} in "
                f"delay_all_reduce_named_params and param_to_hook_all_reduce, but {name!r} is no "
                "parameter of it"
            )
    found = frozenset(names[id(parameter)] for parameter in delayed.values())
    if names[id(trigger)] in found:
        raise ValueError(
            f"param_to_hook_all_reduce is {names[id(trigger)]!r}, which is delayed itself: choose "
            "one that is not in delay_all_reduce_named_params"
        )
    return names[id(trigger)], found
