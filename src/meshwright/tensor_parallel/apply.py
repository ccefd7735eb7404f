"""`parallelize_module`: applies styles to the modules of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Protocol, TypeVar, cast

from torch import nn

from meshwright.comm.dtensors.dtensor import (
    check_ties,
    current_mesh,
    is_dtensor,
    what_became,
)
from meshwright.comm.dtensors.operators.mixed_lists import take_lists_apart
from meshwright.comm.dtensors.operators.written_parts import write_through
from meshwright.errors import warn
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.checks.equality import verify_replicated
from meshwright.tensor_parallel.checks.following import follow_first_forward
from meshwright.tensor_parallel.checks.passes import Passes
from meshwright.tensor_parallel.layouts import Site, check_mesh
from meshwright.tensor_parallel.styles import ParallelStyle
from meshwright.torch_internals.modules import forward_pre_hooks_of, require_module

M = TypeVar("M", bound=nn.Module)
_THEIRS = "_meshwright_styled_by_user"


class Style(Protocol):
    """A style of torch's protocol: one of torch itself, of another package, or of a user."""

    src_data_rank: int | None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...


AnyStyle = ParallelStyle | Style


def parallelize_module(
    module: M,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: AnyStyle | Mapping[str, AnyStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> M:
    """Parallelize ``module`` over the ranks of ``device_mesh``, in place, and return it.

    ``parallelize_plan`` is a style for the module itself, or names styles by patterns of module
    names: each part between dots is matched by `fnmatch` (``layers.*.mlp.up``; "" is the module).
    The mesh has one dim: slice a larger one by name. None takes the mesh of the ``with`` block.

    Parameters that styles shard or replicate become DTensors at rest; forward and backward run on
    local tensors. Other styles of torch's protocol, such as torch's own, run as they are, on
    DTensors. Values come from rank ``src_data_rank`` of the axis; None keeps each rank's values,
    and then replicated parameters are compared. Ties are kept.

    The first forward detects layouts that do not match, before it sends anything. A rank that
    aborted a pass and begins another is stopped before the two mix, unless the forward is compiled
    as a whole. The first, second, fourth pass and so on compare inputs that a style declares
    Replicate (ValueError); such steps of an optimizer compare the gradients of replicated
    parameters (`LayoutError`).

    Warns for a pattern that matches nothing, and for a plan of None. Raises TypeError for a plan
    of another type, ValueError for a mesh of several dims or for a layer that is never called,
    `LayoutError` if a replicated parameter differs between ranks. The first forward raises
    ValueError for a tie that the plans of all calls so far break.
    """
    require_module(module, "parallelize_module")
    mesh = current_mesh() if device_mesh is None else device_mesh
    if parallelize_plan is None:
        warn(
            "No parallelize_plan is provided and auto-parallel is not supported "
            "at the moment, so this parallelize_module call will do nothing."
        )
        return module
    module = apply_plan(module, mesh, parallelize_plan, src_data_rank=src_data_rank)
    Passes.on(Site.of(mesh, "").axis).compare(module, list(_plain(module)))
    return module


def apply_plan(
    module: M,
    mesh: DeviceMesh,
    parallelize_plan: AnyStyle | Mapping[str, AnyStyle],
    *,
    src_data_rank: int | None,
    follows: bool = True,
) -> M:
    """Apply a plan like `parallelize_module`, for callers that compare passes themselves.

    Without ``follows`` the first forward looks for no layouts that do not match.
    """
    take_lists_apart()
    write_through()
    _check_plan(parallelize_plan)
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    check_mesh(mesh)
    for pattern, style in plan.items():
        found = list(matches(module, pattern))
        if not found:
            warn(_unmatched(module, pattern))
        for name, submodule in found:
            if isinstance(style, ParallelStyle):
                changed = style.apply_to(submodule, mesh, name=name, src_data_rank=src_data_rank)
            else:
                style.src_data_rank = src_data_rank
                changed = style._apply(submodule, mesh)
            if not type(style).__module__.startswith("meshwright."):
                for parameter in changed.parameters():
                    vars(parameter)[_THEIRS] = True
            module = cast("M", _put(module, name, submodule, changed))
    for style in plan.values():
        if isinstance(style, ParallelStyle):
            style.finish(module)
    _call_what_was_cut(module)
    if follows:
        follow_first_forward(module, check_ties)
    if src_data_rank is None:
        verify_replicated(module, Site.of(mesh, "").axis)
    return module


def _plain(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List plain parameters that no style has been applied to: none of ours, none of the user's.

    A parameter tied to one that has become a DTensor is left out: its module gets a style later, or
    is rejected.
    """
    for name, parameter in module.named_parameters():
        is_known = _THEIRS in vars(parameter) or what_became(parameter) is not None
        if not is_dtensor(parameter) and not is_known:
            yield name, parameter


def matches(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in ``module`` whose names match ``pattern`` part by part, with names."""
    if not pattern:
        yield "", module
        return
    token, _, rest = pattern.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, token):
            for below, found in matches(child, rest):
                yield f"{name}.{below}" if below else name, found


def _call_what_was_cut(root: nn.Module) -> None:
    """Keep torch's modules from using parameters without calling the layers that have them.

    Raises ValueError for the output layer of an nn.MultiheadAttention, which it never calls.
    """
    for name, part in root.named_modules():
        if type(part) is nn.MultiheadAttention and is_dtensor(part.out_proj.weight):
            path = f"{name}.out_proj" if name else "out_proj"
            raise ValueError(
                f"{path} has a style, but nn.MultiheadAttention reads its weight and does not call "
                "it: leave it out of the plan, or use an attention of separate nn.Linear layers"
            )
        if not any(is_dtensor(parameter) for parameter in part.parameters()):
            continue
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        is_layer = isinstance(part, nn.TransformerEncoderLayer)
        if is_layer and _look_on not in forward_pre_hooks_of(part).values():
            # In evaluation torch's fast path reads the parameters directly, unless there are hooks.
            part.register_forward_pre_hook(_look_on)


def _look_on(module: nn.Module, inputs: object) -> None:
    """Forward pre-hook that does nothing: its presence disables torch's fast path."""


def _check_plan(plan: object) -> None:
    if isinstance(plan, Mapping):
        wrong = {key: style for key, style in plan.items() if not _is_style(style)}
        if not wrong:
            return
        found = ", ".join(f"{type(style)} for {key!r}" for key, style in wrong.items())
    elif _is_style(plan):
        return
    else:
        found = str(type(plan))
    raise TypeError(
        "Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, "
        f"{found} found!"
    )


def _is_style(given: object) -> bool:
    """Whether ``given`` is a style: no class, and no module, whose ``_apply`` is another method."""
    return callable(getattr(given, "_apply", None)) and not isinstance(given, nn.Module | type)


def _unmatched(module: nn.Module, pattern: str) -> str:
    names = [name for name, _ in module.named_modules() if name]
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = f" The closest names are {', '.join(close)}." if close else ""
    return (
        f"Parallelize plan key '{pattern}' could not be resolved: no module of "
        f"{type(module).__name__} has a name that matches it, skipping this plan entry.{hint}"
    )


def _put(root: nn.Module, name: str, before: nn.Module, after: nn.Module) -> nn.Module:
    """Replace a module by what a style returned for it; returns the root."""
    if after is before:
        return root
    if not name:
        return after
    path, _, key = name.rpartition(".")
    setattr(root.get_submodule(path), key, after)
    return root
