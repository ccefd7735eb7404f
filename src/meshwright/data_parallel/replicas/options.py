"""The options of `replicate` and `DistributedDataParallel`, as given and as checked.

::

    ReplicateKeywords     the keywords that both take, one list for both
        | resolved        checked against the module and each other, before any collective
    ReplicateOptions      frozen; names instead of objects, sizes in bytes
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from meshwright.data_parallel.replicas.low_precision import LowPrecision
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.modules import IGNORED_NAMES

AXIS = "replicate"
"""The name of the axis when no mesh names it."""

UnusedGradient = Literal["none", "zeros"]


class ReplicateKeywords(TypedDict, total=False):
    """The keywords of `replicate` and of `DistributedDataParallel`; all may be left out."""

    process_group: Any
    """The axis, as a process group; all ranks when neither this nor ``device_mesh`` is given."""
    device_mesh: DeviceMesh | None
    """The axis, as a mesh with one dim."""
    init_sync: bool
    """Give all ranks the parameters and buffers of rank 0 at set-up (True)."""
    broadcast_buffers: bool | None
    """The older name of ``forward_sync_buffers``, which counts where both are given; False leaves
    all ranks the buffers that they have at set-up, too."""
    forward_sync_buffers: bool | None
    """Give all ranks the buffers of rank 0 in each forward pass (True)."""
    bucket_cap_mb: float | None
    """MiB that close a gradient bucket (25); the first is closed at 1."""
    bucket_cap_mb_list: Sequence[float] | None
    """MiB that close the buckets one by one, the last for all that follow."""
    gradient_as_bucket_view: bool
    """Leave each ``.grad`` as a view of its bucket (False)."""
    static_graph: bool
    """Check that every iteration uses the same parameters (False), see `StaticGraph`."""
    find_unused_parameters: bool
    """Unused parameters are always found, without a walk: either value gives the same."""
    batched_grad_copy: bool
    """Small gradients are always copied together: either value gives the same."""
    skip_all_reduce_unused_params: bool
    """Leave what no rank used in the first reduction out of all later ones (False)."""
    unused_gradient: UnusedGradient
    """The value of ``.grad`` where no rank had a gradient: ``"none"`` leaves it, so that optimizers
    skip the parameter; ``"zeros"`` lets them decay it. A parameter that was used on other ranks
    only gets the mean either way, or the ranks would part."""
    delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None
    """Parameters whose gradients wait for that of ``param_to_hook_all_reduce``."""
    param_to_hook_all_reduce: nn.Parameter | None
    """The delayed ones are reduced right after the bucket that holds this parameter."""
    mixed_precision: LowPrecision | None
    """Compute in other dtypes, see `MixedPrecision`."""
    stop_on_non_finite: bool
    """Raise `NonFiniteError` on every rank at the end of a backward pass in which a gradient was
    not finite (False). Not with a gradient scaler, which skips such passes."""


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
    """The options that users gave, checked."""

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
    keywords: ReplicateKeywords,
    *,
    ignored: Collection[nn.Module] = (),
    device_ids: Sequence[int | torch.device] | None = None,
    wrong_mesh: Exception,
) -> ReplicateOptions:
    """Check what ``keywords`` ask for ``module``, and make options of it.

    Raises TypeError for a keyword that there is none of, RuntimeError for a group and a mesh,
    ``wrong_mesh`` for a mesh with more than one dim, and ValueError for values out of range or that
    exclude each other.
    """
    unknown = sorted(keywords.keys() - ReplicateKeywords.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"got an unexpected keyword argument {unknown[0]!r}; there are "
            f"{', '.join(ReplicateKeywords.__annotations__)}"
        )
    group, axis = _axis_of(keywords, wrong_mesh)
    precision = keywords.get("mixed_precision")
    older, newer = keywords.get("broadcast_buffers"), keywords.get("forward_sync_buffers")
    return ReplicateOptions(
        process_group=group,
        mesh=keywords.get("device_mesh"),
        axis=axis,
        ignored=frozenset(ignored),
        ignored_names=frozenset(getattr(module, IGNORED_NAMES, ())),
        device_ids=tuple(device_ids) if device_ids else None,
        init_sync=keywords.get("init_sync", True),
        init_buffers=newer is not None or older is not False,
        broadcast_buffers=(older if newer is None else newer) is not False,
        mixed_precision=precision,
        reduction=_reduction(module, keywords, precision),
    )


def _reduction(
    module: nn.Module, keywords: ReplicateKeywords, precision: LowPrecision | None
) -> ReductionSettings:
    asked = keywords.get("bucket_cap_mb")
    listed = tuple(keywords.get("bucket_cap_mb_list") or ())
    cap = 25 if asked is None else asked
    if min(cap, *listed, cap) <= 0:
        raise ValueError(
            f"expected bucket sizes above 0 MiB, found bucket_cap_mb={asked}, "
            f"bucket_cap_mb_list={listed}"
        )
    unused = keywords.get("unused_gradient", "none")
    if unused not in ("none", "zeros"):
        raise ValueError(f'expected unused_gradient="none" or "zeros", found {unused!r}')
    trigger, delayed = _delayed(module, keywords)
    return ReductionSettings(
        first_bytes=int(min(1, cap) * 2**20),
        cap_bytes=int(cap * 2**20),
        is_gradient_view=keywords.get("gradient_as_bucket_view", False),
        reduce_dtype=None if precision is None else precision.reduce_dtype,
        listed_bytes=tuple(int(size * 2**20) for size in listed),
        delayed=delayed,
        trigger=trigger,
        is_static=keywords.get("static_graph", False),
        skips_unused=keywords.get("skip_all_reduce_unused_params", False),
        zeros_for_unused=unused == "zeros",
        is_watched=keywords.get("stop_on_non_finite", False),
        stops_on_non_finite=keywords.get("stop_on_non_finite", False),
    )


def _axis_of(keywords: ReplicateKeywords, wrong_mesh: Exception) -> tuple[Any, str]:
    group, mesh = keywords.get("process_group"), keywords.get("device_mesh")
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


def _delayed(module: nn.Module, keywords: ReplicateKeywords) -> tuple[str | None, frozenset[str]]:
    """Name the parameter that is waited for, and those that wait."""
    asked = keywords.get("delay_all_reduce_named_params")
    trigger = keywords.get("param_to_hook_all_reduce")
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
