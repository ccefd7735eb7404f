"""Conversion between local tensors with our placements and torch's DTensor.

Nothing here computes: a DTensor is built around a local tensor whose storage it shares, or split
into its components. Forward and backward run on local tensors, see `local_leaves`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshwright.axes import Axes
from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.shard_view import Ranges, length_of, narrowed
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.process_groups import communicator, peers
from meshwright.errors import CommunicationError, LayoutError
from meshwright.layout import (
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
    contiguous_strides,
)
from meshwright.torch_internals.distributed import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    concatenate_meshes,
    dtensor_handlers,
    flatten_mesh,
    mesh_resources,
    root_mesh,
    set_spec,
    spec_of,
)
from meshwright.torch_internals.tensors import (
    local_tensor_of,
    mark_parameter,
    number_operator,
    set_local_tensor,
)


def _number_of(op: object, args: tuple[DTensor], kwargs: object) -> object:
    """Compute ``item()`` of the full tensor. Collective unless it is replicated."""
    (tensor,) = args
    if all(is_replicated(placement) for placement in tensor.placements):
        return local_tensor_of(tensor).item()
    with torch.no_grad():
        return tensor.full_tensor().item()


# torch takes this rank's part of a sum or norm for the whole: an optimizer that asks for a norm as
# a number would scale each rank's rows by another one. Where torch knows better, its own stays.
dtensor_handlers().setdefault(number_operator, _number_of)

AnyPlacement = Placement | TorchPlacement
"""A placement of ours, or one of torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """The components of a DTensor: local tensor, mesh, placements, shape and strides."""

    local: torch.Tensor
    """This rank's part; it shares the DTensor's storage."""
    mesh: DeviceMesh
    placements: tuple[TorchPlacement, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    stride: tuple[int, ...]


def dtensor_at_rest(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Make a DTensor of global ``shape`` and ``stride`` around ``local``, which it does not copy.

    ``placements`` has one entry per dim of ``mesh``, ours or torch's. Nothing is sent. The shape is
    passed rather than derived, so that short and empty last chunks are right.

    Raises `LayoutError` when ``local`` is not the part that the placements give this rank.

    >>> dtensor_at_rest(torch.zeros(2, 3), mesh, [Shard(0)], (4, 3), (3, 1))  # on two ranks
    """
    # torch's from_local would copy it to the device of the mesh.
    return _made(local.detach(), _spec_at_rest(local, mesh, placements, shape, stride))


def parameter_at_rest(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement],
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """Make a parameter as `dtensor_at_rest` makes a DTensor; its local tensor is ``local`` itself.

    `torch.nn.Parameter` would make a second DTensor, by an operator.
    """
    spec = _spec_at_rest(local, mesh, placements, shape, stride)
    found = _made(local, spec, requires_grad=requires_grad)
    set_local_tensor(found, local)
    mark_parameter(found, is_parameter=True)
    return cast("nn.Parameter", found)


def _made(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
    # Not torch's __init__, which makes nothing: it loads the compiler, and costs more than this.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def _spec_at_rest(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensorSpec:
    # One for all that are placed alike: torch never changes it, and it is slow to make. It keeps
    # its mesh, so that the id in the key stays that of this mesh.
    key = (id(mesh), tuple(placements), tuple(shape), tuple(stride), local.dtype, local.shape)
    known: DTensorSpec | None = PROCESS.layouts.get(key)
    if known is not None:
        return known
    spread, shape = torch_placements(placements), tuple(shape)
    here = mesh.get_coordinate()
    if here is not None:
        part = tuple(map(length_of, ranges_at(shape, mesh, spread, here)))
        if tuple(local.shape) != part:
            raise LayoutError(
                f"expected this rank's part of a tensor of shape {shape}, placed {list(spread)} "
                f"on {mesh}, to have shape {part}; found {tuple(local.shape)}"
            )
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return PROCESS.layouts.setdefault(key, DTensorSpec(mesh, spread, tensor_meta=meta))


def dtensor_like(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """Make a DTensor around ``local``, which it does not copy, with the placement of ``like``.

    For every step: it takes a twentieth of the time of `dtensor_at_rest`, which derives and checks
    the placement. Raises `LayoutError` when ``local`` has another shape or dtype than the part of
    ``like``, TypeError when ``like`` is no DTensor.
    """
    if not isinstance(like, DTensor):
        raise TypeError(f"expected a DTensor to follow, found {type(like).__name__}")
    known = local_tensor_of(like)
    if local.shape != known.shape or local.dtype != known.dtype:
        raise LayoutError(
            f"expected a part of shape {tuple(known.shape)} and {known.dtype}, found "
            f"{tuple(local.shape)} and {local.dtype}"
        )
    # torch would look an offset up in the DTensor's own storage, which is empty.
    begins = local.new_empty(0) if local.storage_offset() else local
    found = _made(begins, spec_of(like))
    set_local_tensor(found, local)
    return found


def dtensor_around(local: torch.Tensor, rest: AtRest) -> DTensor:
    """Make a DTensor with the placement of ``rest`` around ``local``, on the same memory."""
    meta = TensorMeta(torch.Size(rest.shape), rest.stride, local.dtype)
    spec = DTensorSpec(rest.mesh, rest.placements, tensor_meta=meta)
    return _made(local.detach(), spec)


def beginning_storage(local: torch.Tensor) -> torch.Tensor:
    """Make a tensor on the memory of ``local`` with a storage that begins at its first element.

    DTensors hold such tensors, so that copies and files contain this part alone. Compilers refuse
    DTensors around views with an offset, and see here that parts do not overlap. Both tensors share
    a version counter. The result keeps the storage of ``local`` alive, which must never be resized
    or moved (`share_memory_`): users get no tensor on it. Subclasses are returned unchanged.
    """
    if type(local) is not torch.Tensor:
        return local
    strides, storage, offset = local.stride(), local.untyped_storage(), local.storage_offset()
    if storage.device.type == "meta":  # there is no memory to share
        return torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device)
    size, reach = local.itemsize, local.numel()
    if not local.is_contiguous():
        reach = sum((n - 1) * step for n, step in zip(local.shape, strides, strict=True)) + 1
    part = storage[offset * size : (offset + reach) * size]
    return _counted_with(local, part, local.shape, strides)


def beginning_piece(line: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """As `beginning_storage`, for the elements of the 1-D ``line`` from ``start`` on."""
    storage, size = line.untyped_storage(), line.itemsize
    if type(line) is not torch.Tensor or storage.device.type == "meta":
        return beginning_storage(line[start : start + math.prod(shape)].view(shape))
    first = line.storage_offset() + start
    part = storage[first * size : (first + math.prod(shape)) * size]
    return _counted_with(line, part, shape, contiguous_strides(shape))


def _counted_with(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    shape: Sequence[int],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Make a tensor on ``storage`` whose writes are counted for ``tensor`` too."""
    # What is detached shares the counter of writes; `.data` gives it other memory, not another
    # counter.
    found = tensor.detach()
    found.data = tensor.new_empty(0).set_(storage, 0, shape, strides)
    return found


def put_on_mesh(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[AnyPlacement]) -> None:
    """Move a DTensor to ``mesh`` in place: this rank keeps its local part.

    The object that optimizers hold stays; tensors derived from it earlier keep the old mesh.
    """
    found = cast("DTensor", tensor)
    known = spec_of(found)
    set_spec(found, DTensorSpec(mesh, torch_placements(placements), tensor_meta=known.tensor_meta))


def at_rest(tensor: DTensor) -> AtRest:
    """Split ``tensor`` into its components; the inverse of `dtensor_at_rest`."""
    return AtRest(
        local=local_of(tensor),
        mesh=tensor.device_mesh,
        placements=tuple(tensor.placements),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def known_at_rest(tensor: torch.Tensor) -> AtRest | None:
    """Split ``tensor`` into its components if it is a DTensor; None for any other tensor."""
    return at_rest(tensor) if isinstance(tensor, DTensor) else None


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, outside autograd; any other tensor unchanged.

    If the part is of a subclass with all-gather extensions: the plain tensor with its values.
    """
    local = local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local if local is tensor or type(local) is torch.Tensor else values_of(local)


def ranges_at(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    coordinate: Sequence[int],
) -> list[Ranges]:
    """List, for each dim of a tensor of ``shape``, the rows that the rank at ``coordinate`` holds.

    Placements that do not shard count as whole.
    """
    cuts: list[tuple[int, TorchShard | StridedShard, int]] = []
    last: list[tuple[int, TorchShard | StridedShard, int]] = []
    for number, placement in enumerate(placements):
        if not isinstance(placement, TorchShard | StridedShard):
            continue
        later = [
            mesh.size(n)
            for n, each in enumerate(placements)
            if n > number and getattr(each, "dim", None) == placement.dim
        ]
        pieces = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        if isinstance(placement, StridedShard) and later and pieces == math.prod(later):
            # Made by `cut_once_more`: it cuts what all later dims of the mesh have left. Cut here,
            # into parts of each later piece, uneven rows would go to other ranks.
            last.insert(0, (number, placement, 1))
        else:
            cuts.append((number, placement, pieces))
    found: list[Ranges] = [[(0, size)] for size in shape]
    for number, placement, pieces in (*cuts, *last):
        # Several pieces: tensors side by side, of each of which the rank holds a part.
        dim, parts = placement.dim % len(shape), list[tuple[int, int]]()
        for piece in range(pieces):
            start, rows = chunk(length_of(found[dim]), pieces, piece)
            inside, length = chunk(rows, mesh.size(number), coordinate[number])
            parts.append((start + inside, length))
        found[dim] = [part for each in parts for part in narrowed(found[dim], *each)]
    return found


def current_mesh() -> DeviceMesh:
    """Return the mesh whose ``with`` block the caller is in. Raises RuntimeError without one."""
    return mesh_resources.get_current_mesh()


def mesh_communicators(mesh: DeviceMesh, unnamed: str = "shard") -> tuple[Communicator, ...]:
    """List the communicator of each dim of ``mesh``, by the mesh's axis names, or ``unnamed``.

    Raises `CommunicationError` when the group of one was destroyed.
    """
    names = mesh.mesh_dim_names or (unnamed,) * mesh.ndim
    try:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    except RuntimeError as error:
        if "Could not resolve the process group" not in str(error):
            raise
        raise CommunicationError(
            f"a process group of {mesh} was destroyed. torch gives DTensors of "
            "a later mesh of the same ranks the mesh that it has seen first: keep the groups of a "
            "mesh for as long as the process has DTensors on its ranks"
        ) from error
    return tuple(communicator(group, axis=name) for group, name in zip(groups, names, strict=True))


def mesh_over(parent: Communicator, axes: Axes, dims: Sequence[Sequence[str]]) -> DeviceMesh:
    """Make a mesh over the ranks of ``parent``, numbered by ``axes``.

    Only the ranks of ``parent`` call it. ``dims`` are the axes with more than one rank, in any
    order, several where one dim runs along them all; its name joins theirs. Each dim has its own
    group, made for its ranks if there is none.
    """
    here, names = axes.coordinate(parent.rank), [name for dim in dims for name in dim]
    joined = ["_".join(dim) for dim in dims]
    groups = [
        peers(parent, [parent.ranks[rank] for rank in axes.peers(parent.rank, dim)], name)
        for dim, name in zip(dims, joined, strict=True)
    ]
    sizes = [axes.size(name) for name in names]
    numbers = [
        parent.ranks[axes.rank({**here, **dict(zip(names, position, strict=True))})]
        for position in itertools.product(*map(range, sizes))
    ]
    kind = parent.device.type
    if len(dims) == 1:
        return DeviceMesh.from_group(groups[0].group, kind, mesh_dim_names=tuple(joined))
    return DeviceMesh.from_group(
        [each.group for each in groups],
        kind,
        mesh=torch.tensor(numbers, device="cpu").view([each.size for each in groups]),
        mesh_dim_names=tuple(joined),
    )


def concatenated_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join the dims of all ``meshes``, which are slices of one mesh, into one mesh."""
    return concatenate_meshes(meshes)


def flattened_mesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the dims ``names`` of ``mesh`` as one dim. Collective when there are several."""
    if len(names) == 1:
        return mesh[names[0]]
    return flatten_mesh(mesh[tuple(names)], "_".join(names))


def mesh_beside(over: DeviceMesh, ranks: Collection[int]) -> DeviceMesh | None:
    """Return the other dims of the mesh around ``over`` that reach ``ranks`` with it, as one dim.

    None where ``over`` reaches them all. Collective for several dims. Raises LayoutError without.
    """
    around, own = root_mesh(over), {*over.mesh.flatten().tolist()}
    lines = {n: {*around[n].mesh.flatten().tolist()} for n in around.mesh_dim_names or ()}
    found = [
        name
        for name, line in lines.items()
        if line <= {*ranks} and len(line & own) == 1 < len(line)
    ]
    if math.prod(len(lines[name]) for name in found) * len(own) != len(ranks):
        raise LayoutError(f"no dims of {around} are what ranks {[*ranks]} have beside {over}")
    return flattened_mesh(around, found) if found else None


def is_replicated(placement: TorchPlacement) -> bool:
    """Check whether every rank along the dim holds the same."""
    return isinstance(placement, TorchReplicate)


def cut_once_more(
    placements: Sequence[AnyPlacement], mesh: DeviceMesh, cutting: int, dim: int
) -> tuple[tuple[TorchPlacement, ...], bool]:
    """Shard by dim ``cutting`` of ``mesh`` after all others; also returns whether that is strided.

    A DTensor is sharded by the dims of its mesh in order. If a later dim of the mesh has already
    sharded the same ``dim``, the parts of ``cutting`` are strided over the full tensor.
    """
    spread = list(torch_placements(placements))
    later = range(cutting + 1, len(spread)) if mesh.size(cutting) > 1 else ()
    factor = 1
    for index in later:
        placement = spread[index]
        if isinstance(placement, TorchShard | StridedShard) and placement.dim == dim:
            factor *= mesh.size(index)
    if factor > 1:
        spread[cutting] = StridedShard(dim, split_factor=factor)
    return tuple(spread), factor > 1


def local_gradient(
    gradient: torch.Tensor | None, like: AtRest, kept: Sequence[int]
) -> torch.Tensor | None:
    """Return this rank's part of a gradient, redistributed as ``like`` except over ``kept``.

    ``kept`` are dims of the mesh over which the caller sums.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    wanted = [
        found if index in kept else placement
        for index, (found, placement) in enumerate(
            zip(gradient.placements, like.placements, strict=True)
        )
    ]
    if tuple(wanted) != tuple(gradient.placements):
        gradient = gradient.redistribute(placements=wanted)
    return local_tensor_of(gradient)


def torch_placements(placements: Sequence[AnyPlacement]) -> tuple[TorchPlacement, ...]:
    """Convert ``placements`` to torch's; torch's own are returned unchanged."""
    return tuple(_torch_placement(placement) for placement in placements)


def _torch_placement(placement: AnyPlacement) -> TorchPlacement:
    match placement:
        case Shard(dim=dim):
            return TorchShard(dim)
        case Replicate():
            return TorchReplicate()
        case Partial(reduction=reduction):
            return TorchPartial(reduction)
    return placement


def our_placement(placement: AnyPlacement, name: str) -> Placement:
    """Convert ``placement`` to ours; ours are unchanged. Raises `LayoutError` for a strided one."""
    if isinstance(placement, Shard | Replicate | Partial):
        return placement
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    if isinstance(placement, TorchPartial):
        return Partial(placement.reduce_op)
    raise LayoutError(
        f"{name!r} is placed {placement}, which is not one box on each rank: expected Shard, "
        "Replicate or Partial"
    )


_BECAME = "_meshwright_became"


@dataclass(frozen=True, slots=True, eq=False)
class Became:
    """The DTensor that a plain parameter was converted to; copies of the plain one have none."""

    parameter: nn.Parameter
    placement: AnyPlacement
    name: str
    is_partial: bool
    """True when each rank computes a part of its gradient."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def note_became(given: nn.Parameter, became: Became) -> None:
    vars(given)[_BECAME] = became


def what_became(given: torch.Tensor) -> Became | None:
    """Return the record of what ``given`` was converted to; None for any other tensor."""
    return vars(given).get(_BECAME)


def check_ties(root: nn.Module, held: Iterable[torch.Tensor] | None = None) -> None:
    """Raise ValueError where a module still holds a plain parameter that is a DTensor elsewhere.

    ``held`` are the parameters below ``root``, where they are known.
    """
    if held is not None and not any(_BECAME in vars(parameter) for parameter in held):
        return
    for path, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            became = None if parameter is None else what_became(parameter)
            if became is not None:
                raise ValueError(
                    f"{path}.{key} is tied to {became.name}, which is placed {became.placement} "
                    f"over tensor ranks, but the plan names only one of them: add a style for "
                    f"{path!r}, or untie them"
                )
