"""Turns parameters of a module into DTensors, with their values and ties."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_after_hooks
from meshwright.comm.dtensors.dtensor import (
    AnyPlacement,
    Became,
    dtensor_at_rest,
    is_dtensor,
    known_at_rest,
    note_became,
    what_became,
)
from meshwright.comm.dtensors.gather_dtensor import part
from meshwright.comm.dtensors.local_leaves import local_leaf
from meshwright.comm.dtensors.subclasses import has_calls
from meshwright.comm.dtensors.unreadable import retire
from meshwright.layout import Replicate
from meshwright.tensor_parallel.layouts import Site
from meshwright.torch_internals.autograd import backward_hooks_of


@torch.no_grad()
def distribute(
    module: nn.Module,
    key: str,
    placement: AnyPlacement,
    site: Site,
    source: int | None,
    *,
    is_partial: bool = False,
) -> None:
    """Make parameter ``key`` of ``module`` a DTensor with ``placement`` on the axis of ``site``.

    Its values are those of rank ``source`` of the axis (one broadcast), or each rank's own if that
    is None. Parameters on the meta device stay there. None stays None. ``is_partial``: each rank
    computes a summand of its gradient.

    Raises ValueError for a parameter that is tied to one with another placement, that has been
    distributed before, that has hooks, or whose class overrides torch's calls.
    """
    given = module._parameters[key]
    if given is None:
        return
    name = f"{site.labels.name}.{key}" if site.labels.name else key
    if known_at_rest(given) is not None:
        raise ValueError(
            f"{name} is a DTensor already, placed {list(given.placements)} on "  # pyrefly: ignore[missing-attribute]
            f"{given.device_mesh}: parallelize each module once"  # pyrefly: ignore[missing-attribute]
        )
    became = what_became(given)
    if became is None:
        _check_given(given, name)
        became = Became(
            _distributed(given, name, placement, site, source),
            placement,
            name,
            is_partial=is_partial,
        )
        note_became(given, became)
        retire(given, name, "parallelize_module")
    elif became.placement != placement or became.is_partial is not is_partial:
        raise ValueError(
            f"{name} and {became.name} are one tied parameter, which cannot be placed {placement} "
            f"and {became.placement} at once: give both modules styles that place it alike "
            "(RowwiseParallel on an embedding, ColwiseParallel on its output layer), or untie them"
        )
    module._parameters[key] = became.parameter
    local_leaf(became.parameter)  # registers it, so that later writes to .data are seen


def guard_loading(module: nn.Module) -> None:
    """Reject unsharded tensors for DTensors of ``module`` in `load_state_dict(assign=True)`."""
    module.register_load_state_dict_pre_hook(_refuse_whole)


def _check_given(given: nn.Parameter, name: str) -> None:
    """Raise ValueError for hooks and overridden calls, which the DTensor would not have."""
    if has_calls(given):
        raise ValueError(
            f"{name} is a {type(given).__name__}, a tensor subclass with calls of its own, which "
            "the DTensor that takes its place would not make: leave the layer out of the plan"
        )
    if backward_hooks_of(given) or has_after_hooks(given):
        raise ValueError(
            f"{name} has hooks for its gradient, which the DTensor that takes its place would not "
            "have: register hooks, and optimizers in the backward, after parallelize_module, and "
            "call it before replicate, DistributedDataParallel or fully_shard"
        )


def _refuse_whole(
    module: nn.Module,
    state: Mapping[str, object],
    prefix: str,
    metadata: Mapping[str, object],
    *rest: object,
) -> None:
    """Load pre-hook: raises ValueError if loading would replace DTensors by plain tensors."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for key, parameter in module._parameters.items():
        given = state.get(prefix + key)
        if is_dtensor(parameter) and isinstance(given, torch.Tensor) and not is_dtensor(given):
            raise ValueError(
                f"{prefix}{key} is a DTensor, and load_state_dict(assign=True) was given a plain "
                f"tensor of shape {tuple(given.shape)} to put in its place: load whole tensors "
                "with set_model_state_dict and StateDictOptions(full_state_dict=True)"
            )


def _distributed(
    given: nn.Parameter, name: str, placement: AnyPlacement, site: Site, source: int | None
) -> nn.Parameter:
    axis, data = site.axis, given.detach()
    if data.device.type != "meta":
        data = data.to(axis.device).contiguous()
        if source is not None and not axis.is_alone:
            axis.broadcast(data, source=source, label=f"{name} from rank {source}").wait()
    strides = torch.empty(given.shape, device="meta").stride()
    if isinstance(placement, Replicate) or axis.size == 1:
        whole = dtensor_at_rest(data, site.mesh, [placement], tuple(given.shape), strides)
    else:
        whole = part(data, site.mesh, [placement], strides)
    return nn.Parameter(whole, requires_grad=given.requires_grad)
