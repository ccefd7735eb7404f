"""Parameters of a module that become DTensors: their values, their ties, their equality.

A tied parameter becomes one DTensor. Whoever still holds the plain one finds on it what it became.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensor import (
    AnyPlacement,
    dtensor_at_rest,
    is_dtensor,
    is_replicated,
    known_at_rest,
    mesh_communicators,
)
from meshwright.comm.whole import part
from meshwright.errors import LayoutError
from meshwright.layout import Replicate
from meshwright.tensor_parallel.layouts import Site

__all__ = [
    "became",
    "check_ties",
    "distribute",
    "guard_loading",
    "verify_plain",
    "verify_replicated",
]

_BECAME = "_meshwright_became"


class _Became:
    """The DTensor that a plain parameter has become. A copy of the plain one has become nothing."""

    __slots__ = ("is_partial", "name", "parameter", "placement")

    def __init__(
        self, parameter: nn.Parameter, placement: AnyPlacement, name: str, *, is_partial: bool
    ) -> None:
        self.parameter = parameter
        self.placement = placement
        self.name = name
        self.is_partial = is_partial
        """Whether each rank computes a part of its gradient."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


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
    """Make parameter ``key`` of ``module`` a DTensor placed so on the axis of ``site``.

    Its values are those of rank ``source`` of the axis (one broadcast), or those that each rank
    has where that is None. Parameters on the meta device stay there. None stays None.
    ``is_partial`` says that each rank computes a part of its gradient.

    Raises ValueError for a parameter that is tied to one that is placed otherwise, that has been
    distributed before, or that has hooks.
    """
    given = module._parameters[key]
    if given is None:
        return
    name = f"{site.labels.name}.{key}" if site.labels.name else key
    if known_at_rest(given) is not None:
        raise ValueError(
            f"{name} is a DTensor already, placed {list(given.placements)} on "  # pyrefly: ignore[missing-attribute]
            f"{given.device_mesh}: parallelise each module once"  # pyrefly: ignore[missing-attribute]
        )
    became = vars(given).get(_BECAME)
    if became is None:
        _check_hooks(given, name)
        became = _Became(
            _distributed(given, name, placement, site, source),
            placement,
            name,
            is_partial=is_partial,
        )
        vars(given)[_BECAME] = became
    elif became.placement != placement or became.is_partial is not is_partial:
        raise ValueError(
            f"{name} and {became.name} are one tied parameter, which cannot be placed {placement} "
            f"and {became.placement} at once: give both modules styles that place it alike "
            "(RowwiseParallel on an embedding, ColwiseParallel on its output layer), or untie them"
        )
    module._parameters[key] = became.parameter


def guard_loading(module: nn.Module) -> None:
    """Let `load_state_dict(assign=True)` refuse whole tensors for DTensors of ``module`` itself."""
    module.register_load_state_dict_pre_hook(_refuse_whole)


def became(tensor: torch.Tensor) -> str:
    """The name of the DTensor that a plain parameter has become; "" for any other tensor."""
    found = vars(tensor).get(_BECAME)
    return "" if found is None else found.name


def check_ties(root: nn.Module) -> None:
    """Raise ValueError where a module still holds a plain parameter that is a DTensor elsewhere."""
    for path, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            became = None if parameter is None else vars(parameter).get(_BECAME)
            if became is not None:
                raise ValueError(
                    f"{path}.{key} is tied to {became.name}, which is placed {became.placement} "
                    f"over tensor ranks, but the plan names only one of them: add a style for "
                    f"{path!r}, or untie them"
                )


@torch.no_grad()
def verify_replicated(module: nn.Module, communicator: Communicator | None = None) -> None:
    """Check that what is replicated over ranks of an axis is equal there, bit by bit.

    Parameters that are DTensors are compared over each axis of their mesh that replicates them,
    plain ones over ``communicator`` if there is one. All ranks call it together; one exchange of
    digests for each axis. Parameters on the meta device are left out.

    Raises `LayoutError` on all ranks of the axis, naming the first parameter that differs and the
    ranks on both sides.
    """
    by_axis: dict[Communicator, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in module.named_parameters():
        for axis, local in _replicated(parameter, communicator):
            if axis.size > 1 and local.device.type != "meta":
                by_axis.setdefault(axis, []).append((name, local))
    for axis, named in by_axis.items():
        _compare(axis, named, "Seed all ranks alike, or parallelise with src_data_rank=0")


def _check_hooks(given: nn.Parameter, name: str) -> None:
    """Raise ValueError for hooks: they would stay with an object that gets no gradient any more."""
    if given._backward_hooks or given._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} has hooks for its gradient, which the DTensor that takes its place would not "
            "have: register hooks after parallelize_module, and call it before replicate, "
            "DistributedDataParallel or fully_shard"
        )


def _refuse_whole(
    module: nn.Module,
    state: Mapping[str, object],
    prefix: str,
    metadata: Mapping[str, object],
    *rest: object,
) -> None:
    """A hook of loading: raise ValueError where whole tensors would become the parameters."""
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


@torch.no_grad()
def verify_plain(axis: Communicator, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that parameters without a style are equal on the ranks of ``axis``, bit by bit.

    All ranks call it together; one exchange of digests. Raises `LayoutError` on all of them.
    """
    hint = (
        "it has no style, so each rank keeps its own. Seed all ranks alike, or load the same state "
        "on all; where ranks are to differ, give its module a ParallelStyle of your own"
    )
    _compare(axis, named, hint)


def _distributed(
    given: nn.Parameter, name: str, placement: AnyPlacement, site: Site, source: int | None
) -> nn.Parameter:
    axis, data = site.axis, given.detach()
    if data.device.type != "meta":
        data = data.to(axis.device).contiguous()
        if source is not None and axis.size > 1:
            axis.broadcast(data, source=source, label=f"{name} from rank {source}").wait()
    strides = torch.empty(given.shape, device="meta").stride()
    if isinstance(placement, Replicate) or axis.size == 1:
        whole = dtensor_at_rest(data, site.mesh, [placement], tuple(given.shape), strides)
    else:
        whole = part(data, site.mesh, [placement], strides)
    return nn.Parameter(whole, requires_grad=given.requires_grad)


def _replicated(
    parameter: nn.Parameter, communicator: Communicator | None
) -> Iterator[tuple[Communicator, torch.Tensor]]:
    """The axes that replicate ``parameter``, each with what is to be equal there."""
    rest = known_at_rest(parameter)
    if rest is None:
        if communicator is not None:
            yield communicator, parameter.detach()
        return
    axes = mesh_communicators(rest.mesh, "tensor")
    for axis, placement in zip(axes, rest.placements, strict=True):
        if is_replicated(placement):
            yield axis, rest.local.detach()


def _compare(axis: Communicator, named: Sequence[tuple[str, torch.Tensor]], hint: str) -> None:
    rows = [[name, _digest(tensor)] for name, tensor in named]
    text = json.dumps(rows).encode()
    mine = hashlib.sha256(text).digest()
    if len(set(axis.gather_bytes(mine, label="digest of replicated parameters"))) == 1:
        return
    everyone = axis.gather_bytes(text, label="replicated parameters that differ")
    lists = [json.loads(found) for found in everyone]
    for position in range(min(map(len, lists))):
        sides: dict[str, list[int]] = {}
        for rank, found in zip(axis.ranks, lists, strict=True):
            sides.setdefault(found[position][1], []).append(rank)
        if len(sides) > 1:
            differing = " and ".join(map(str, sides.values()))
            raise LayoutError(
                f"axis {axis.axis}: expected {lists[0][position][0]} to be equal on the ranks "
                f"{list(axis.ranks)}, which replicate it; ranks {differing} "
                f"hold different values. {hint}"
            )
    raise LayoutError(f"axis {axis.axis}: the ranks {list(axis.ranks)} replicate other parameters")


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    shape = f"{tuple(tensor.shape)} {tensor.dtype} "
    return hashlib.sha256(shape.encode() + data.numpy().tobytes()).hexdigest()
