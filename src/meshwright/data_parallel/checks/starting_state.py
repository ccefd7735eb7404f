"""State that must be equal on all ranks before the first step: compared, or broadcast from one.

Parameters that become shards are compared by digests of the full tensors, taken before sharding:
afterwards no rank could tell that another had started from other values. Values written since then,
such as a state loaded into the shards, are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import nn

from meshwright.comm import Communicator, watch_run
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.comm.failures.sameness import differing, first_difference, require_equal
from meshwright.comm.streams import is_host
from meshwright.errors import CollectiveMismatchError
from meshwright.gradients import digests_of
from meshwright.torch_internals.autograd import without_transforms
from meshwright.torch_internals.modules import non_persistent_buffers_of
from meshwright.torch_internals.tensors import foreach_copy_

SLAB_BYTES = 64 * 2**20
"""At most so many bytes are copied together for one broadcast; a larger tensor goes alone."""

_ITEM_SIZE = attrgetter("dtype.itemsize")
SAME_DDP = "DDP expects same model across all ranks: "
"""The words of torch's DDP."""

Compared: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
"""A digest of a whole tensor, and of a part that this rank had and has: left out if they differ."""


def compare_parameters(
    communicator: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    sparse: Collection[str] = (),
    *,
    fresh: Collection[str] = (),
    experts: Collection[str] = (),
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    reason: str = "",
) -> None:
    """Check that every rank has the same parameters: names, shapes, dtypes, strides, which train.

    Names in ``sparse`` give sparse gradients, names in ``fresh`` are parameters that were replaced,
    and those in ``experts`` are split over ranks. All are compared too, as are ``buffers``, which
    are to be broadcast. ``reason`` is shown to ranks that do something else meanwhile.

    Raises CollectiveMismatchError on every rank, naming the first tensor that differs and the ranks
    of each version.
    """
    rows = [
        [name, list(t.shape), str(t.dtype), list(t.stride()), t.requires_grad]
        + ["sparse gradient"] * (name in sparse)
        + ["given anew"] * (name in fresh)
        + ["experts"] * (name in experts)
        for name, t in named
    ]
    rows += [
        [name, list(t.shape), str(t.dtype), list(t.stride()), "buffer"]
        for name, t in buffers.items()
    ]
    meaning = "[name, shape, dtype, strides, requires_grad]"
    if reason:
        # Some ranks may be in a gather of another size, which Gloo would take for this one.
        communicator.barrier(label=f"compare parameters{reason}")
    require_equal_tensors(
        communicator, rows, meaning, label=f"compare parameters{reason}", opening=SAME_DDP
    )


def require_equal_tensors(
    communicator: Communicator,
    rows: Sequence[Sequence[object]],
    meaning: str,
    *,
    label: str = "compare parameters",
    opening: str = "",
) -> None:
    """Check that ``rows``, which describe this rank's tensors, are equal on every rank; collective.

    Raises CollectiveMismatchError on every rank, naming the first row that differs.
    """
    watch_run(communicator)

    def error(text: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(f"{opening}{text}")

    remedy = "Build the model in the same way on every rank, wrap and freeze the same of it"
    require_equal(
        communicator, rows, f"its tensors, {meaning},", label=label, error=error, remedy=remedy
    )


def broadcast_tensors(
    communicator: Communicator,
    tensors: Iterable[torch.Tensor],
    *,
    label: str,
    source: int = 0,
    only_changed: bool = False,
) -> None:
    """Overwrite ``tensors`` on every rank, in place, with the values of rank ``source``.

    ``only_changed`` skips tensors that are equal already: an existing graph may need them.

    DTensors send the parts that this rank holds. Tensors travel together as bytes, whatever their
    dtypes, so that many small ones cost one broadcast.
    """
    # The largest elements first: each tensor then starts at a multiple of its element size.
    plain = (values_of(local_of(without_transforms(tensor))) for tensor in tensors)
    found = [tensor if tensor.is_contiguous() else _without_copies(tensor) for tensor in plain]
    ordered = sorted(found, key=_ITEM_SIZE, reverse=True)
    slab: list[torch.Tensor] = []
    size = 0
    for tensor in ordered:
        if slab and size + tensor.nbytes > SLAB_BYTES:
            _broadcast_slab(communicator, slab, label, source, only_changed=only_changed)
            slab.clear()
            size = 0
        slab.append(tensor)
        size += tensor.nbytes
    if size:
        _broadcast_slab(communicator, slab, label, source, only_changed=only_changed)


def _without_copies(tensor: torch.Tensor) -> torch.Tensor:
    """Take one index of each expanded dim of ``tensor``, whose elements share memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def _broadcast_slab(
    communicator: Communicator,
    slab: Sequence[torch.Tensor],
    label: str,
    source: int,
    *,
    only_changed: bool = False,
) -> None:
    if len(slab) == 1 and slab[0].is_contiguous() and not only_changed:
        communicator.broadcast(slab[0].detach(), source=source, label=label).wait()
        return
    total = sum(tensor.nbytes for tensor in slab)
    buffer = torch.empty(total, dtype=torch.uint8, device=slab[0].device)
    views: list[torch.Tensor] = []
    offset = 0
    for tensor in slab:
        piece = buffer[offset : offset + tensor.nbytes]
        views.append(piece.view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    targets = [tensor.detach() for tensor in slab]
    if communicator.rank == source or communicator.backend == "fake":  # which changes nothing
        foreach_copy_(views, targets)
    communicator.broadcast(buffer, source=source, label=label).wait()
    if communicator.rank != source:
        changed = _changed(buffer, targets) if only_changed else range(len(targets))
        if changed:
            foreach_copy_([targets[n] for n in changed], [views[n] for n in changed])


def _changed(buffer: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[int]:
    """Find the ``targets`` whose bits differ from those packed one after another in ``buffer``."""
    found: list[int] = []
    offset = 0
    for number, target in enumerate(targets):
        bits = torch.empty(target.shape, dtype=target.dtype, device=target.device).copy_(target)
        piece = buffer[offset : offset + target.nbytes]
        if not torch.equal(bits.view(-1).view(torch.uint8), piece):
            found.append(number)
        offset += target.nbytes
    return found


def synchronize(
    named: Sequence[tuple[str, torch.Tensor]],
    shard: Communicator | None,
    replicate: Communicator | None,
) -> None:
    """Give all ranks the tensors of the first rank; over ``replicate`` first, so that nodes agree.

    Raises ValueError for tensors on the meta device, or not on the device that their ranks
    communicate from, and CollectiveMismatchError where ranks have other tensors.
    """
    rows = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named]
    for axis in (replicate, shard):
        if axis is None or axis.is_alone:
            continue
        for name, tensor in named:
            if tensor.is_meta:
                raise ValueError(
                    f"sync_module_states broadcasts values, and {name!r} is on the meta device: "
                    "materialize it first (to_empty), or load a state dict after sharding"
                )
            if is_host(tensor.device) and not axis.is_on_host:
                raise ValueError(
                    "The module has CPU parameters or buffers when `sync_module_states=True`, but "
                    f"its group communicates on {axis.device}: {name!r}. Pass device_id, or move "
                    "the module there first"
                )
        require_equal_tensors(axis, rows, "[name, shape, dtype]")
        broadcast_tensors(axis, [tensor for _, tensor in named], label="sync module states")


# ------------------------------------------------------------------------------------ digests


@dataclass(frozen=True, slots=True)
class StartingBuffer:
    """A buffer as it was when its module was sharded."""

    module: nn.Module
    name: str
    start: torch.Tensor
    """Its digest."""
    axes: tuple[Communicator, ...]
    """Those over which ranks must hold it alike."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that the module holds now."""
        return self.module._buffers.get(self.name)


def is_of_one_rank(module: nn.Module, ignored: Collection[int]) -> bool:
    """Whether all parameters of ``module`` are ``ignored``, by ``id``, like those of an expert."""
    parameters = list(module.parameters())
    return bool(parameters) and all(id(parameter) in ignored for parameter in parameters)


def starting_buffers(
    modules: Iterable[nn.Module],
    ignored: Collection[int],
    axes: tuple[Communicator, ...],
    others: Mapping[nn.Module, tuple[Communicator, ...]] = MappingProxyType({}),
) -> tuple[StartingBuffer, ...]:
    """List the buffers of ``modules`` that a state dict holds, alike over ``axes``.

    Modules may have ``others``. Buffers of modules for which `is_of_one_rank` is true are left out.
    """
    held = [
        (module, name, tensor)
        for module in modules
        if module._buffers and not is_of_one_rank(module, ignored)
        for name, tensor in module._buffers.items()
        if tensor is not None and name not in non_persistent_buffers_of(module)
    ]
    digests = digests_of([tensor for _, _, tensor in held]) if held else []
    found: list[StartingBuffer] = []
    for (module, name, _), digest in zip(held, digests, strict=True):
        if digest is not None:
            found.append(StartingBuffer(module, name, digest, others.get(module, axes)))
    return tuple(found)


@torch.no_grad()
def has_values_of(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether ``tensor`` has the values of ``before``, in any dtype and on any device."""
    if tensor.is_meta or before.is_meta or tensor.shape != before.shape:
        return False
    return torch.equal(before.to(tensor.device, tensor.dtype), tensor)


def compare_digests(
    axis: Communicator, named: Sequence[tuple[str, Compared]], found: str, remedy: str
) -> str:
    """Compare digests over ``axis``, except those that a rank does not have.

    All ranks call it together, with what was ``found`` over earlier axes, so that this reaches
    ranks of other rows here. The host waits once for each device.

    Returns a description of the difference with the first name and the ranks, or "".
    """
    names = [name for name, _ in named]
    said = [found, names, _to_host([each for _, each in named])]
    everyone = differing(axis, said, label="compare starting values")
    before = next((found for found, _, _ in everyone if found), "")
    if before or any(theirs != names for _, theirs, _ in everyone):
        return before  # other parameters, not other values: what the first pass compares
    difference = first_difference(axis.ranks, [row[2] for row in everyone], of_all=True)
    if difference is None:
        return ""
    return (
        f"axis {axis.axis}: expected {names[int(difference.place)]!r} to have the same values on "
        f"all ranks, found some on {difference.sides}. {remedy}"
    )


def _to_host(compared: Sequence[Compared]) -> list[int | None]:
    """List the digests of whole tensors whose parts have not changed."""
    flat = [digest for each in compared if each is not None for digest in each]
    on: dict[torch.device, list[int]] = {}
    for index, digest in enumerate(flat):
        on.setdefault(digest.device, []).append(index)
    values = [0] * len(flat)
    for indices in on.values():
        stacked = torch.stack([flat[index] for index in indices])
        for index, value in zip(indices, stacked.tolist(), strict=True):
            values[index] = value
    numbers = iter(values)
    found: list[int | None] = []
    for each in compared:
        whole, own, now = (0, 0, 1) if each is None else (next(numbers) for _ in range(3))
        found.append(whole if own == now else None)
    return found
