"""One line of elements on the data axes: a shard at rest, the whole when needed, and gradients.

============  ============  ==========================================================
from          to            operation
============  ============  ==========================================================
Shard         Replicate     all-gather into ``full``           (`gather`)
Replicate     Shard         slice                              (`fill`)
Partial       Shard         reduce-scatter of ``gradient``     (`reduce`, axis ``shard``)
Partial       Replicate     all-reduce                         (`reduce`, axis ``replicate``)
============  ============  ==========================================================

Elements lie in two ways. Packed, the line is cut at any element, and the gather writes straight
into ``full``, whose views are the tensors. Chunked, each shard holds a chunk of every tensor; what
is gathered then lies rank by rank in a staging line and is copied out to the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright.comm import Communicator, Pending
from meshwright.errors import InternalError
from meshwright.layout import ChunkedLayout, FlatLayout

__all__ = [
    "ALONE",
    "BufferTypes",
    "CustomCollective",
    "DataAxes",
    "FlatBuffer",
    "free",
    "is_free",
    "restore",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxes:
    """The axes that one unit's parameters lie on. One of them may be missing."""

    shard: Communicator | None = None
    """Its ranks hold different parts; None where every rank holds the whole."""
    replicate: Communicator | None = None
    """Its ranks hold the same part; None where there is only one holder of each."""

    @property
    def parts(self) -> int:
        """Into how many shards a line is cut."""
        return 1 if self.shard is None else self.shard.size

    @property
    def part(self) -> int:
        """Which shard this rank holds."""
        return 0 if self.shard is None else self.shard.rank

    @property
    def size(self) -> int:
        """How many ranks' gradients are summed."""
        return self.parts * (1 if self.replicate is None else self.replicate.size)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Those that there are, shard first."""
        return tuple(axis for axis in (self.shard, self.replicate) if axis is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTypes:
    """The dtypes of one buffer, and where its shard lives."""

    master: torch.dtype
    """Of the shard that the optimizer steps."""
    compute: torch.dtype
    """Of the gathered parameters."""
    reduce: torch.dtype
    """In which gradients are summed."""
    home: torch.device | None = None
    """The device of the shard and of its gradients; that of the computation when None."""
    is_pinned: bool = False
    """Whether a shard on the CPU lies in pages that a GPU can copy from beside its work."""


class CustomCollective(Protocol):
    """A gather or a reduce-scatter of the user's, as torch's `fully_shard` takes it."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is sent and received."""
        ...

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any) -> Any:  # noqa: ANN401
        """Communicate. A gather is given ``async_op`` and may return a work to wait for; a
        reduce-scatter is given ``op`` and returns when it has ended."""
        ...


ALONE = 2**20
"""Bytes from which a tensor is gathered by itself."""

_Place = tuple[torch.Tensor, tuple[slice, ...] | list[int] | None]
"""Where in a line, and what of a tensor: all of it, a box, or all in another shape."""


class FlatBuffer:
    """The storage of one group of parameters. It moves when told to, and knows no phases."""

    def __init__(
        self,
        layout: FlatLayout | ChunkedLayout,
        axes: DataAxes,
        types: BufferTypes,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.axes = axes
        self.types = types
        self.device = device
        """Where the gathered parameters and their gradients are."""
        self.shard = _shard(layout.shard_size, types, device)
        """This rank's part, in the optimizer's dtype."""
        is_here = self.shard.device == device
        self._alias = axes.parts == 1 and types.master == types.compute and is_here
        self.is_direct = isinstance(layout, FlatLayout) or _is_one_line(layout)
        """Whether what is gathered lies as the tensors do."""
        self.full = self.shard if self._alias else _line(layout.padded_size, types.compute, device)
        """The whole line; without storage between `gather` and `release`."""
        self.views = [self._view(index) for index in range(len(layout.names))]
        """Each tensor, in ``full``. Their version counters are their own."""
        self._regions = [] if self.is_direct else self._rank_major_regions()
        self.gradient = _line(layout.padded_size, types.reduce, device)
        """The gradients of all tensors in the order of the reduction; without storage at rest."""
        self._slots = self._gradient_slots()
        self._sizes = list(layout.slots) if isinstance(layout, ChunkedLayout) else []
        self._together = _gathered_together(layout, types.compute.itemsize)
        self._staging: torch.Tensor | None = None
        self._staged_as_line = False
        self._pending: list[Pending] = []
        self._gathered_version = -1
        self._kept: tuple[Communicator, torch.Tensor] | None = None
        """This rank's part of the whole line among fewer ranks, between two uses; see `keep`."""
        if not self._alias:
            free(self.full)
        free(self.gradient)

    # ------------------------------------------------------------------------ parameters

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Take this rank's part of whole tensors; where there is None the shard stays."""
        part, layout = self.axes.part, self.layout
        if isinstance(layout, FlatLayout):
            for piece in layout.owned(part):
                tensor = tensors[piece.index]
                if tensor is not None:
                    source = tensor.detach().reshape(-1)[piece.start : piece.stop]
                    self.shard[piece.offset : piece.offset + piece.numel].copy_(source)
            return
        for index, box in layout.owned(part):
            tensor = tensors[index]
            if tensor is not None:
                self.local(index).copy_(tensor.detach()[box.slices()])

    def local(self, index: int) -> torch.Tensor:
        """This rank's chunk of tensor ``index``: a view of the shard. For chunked layouts."""
        layout = self.layout
        if not isinstance(layout, ChunkedLayout):
            raise InternalError("only a chunked shard holds a box of every tensor")
        box = layout.box(index, self.axes.part)
        start = layout.offsets[index]
        return self.shard[start : start + box.numel].view(box.shape)

    @property
    def packed(self) -> int:
        """Elements of a shard that are gathered in one piece; those after it one by one."""
        offsets = self.layout.offsets
        if self.is_direct or self._together == len(offsets):
            return self.layout.shard_size
        return offsets[self._together]

    @property
    def gathers(self) -> list[int]:
        """Elements of each gather that brings the whole line together."""
        parts = self.layout.parts
        if self.is_direct:
            return [self.layout.padded_size]
        sizes = (self.packed, *self._sizes[self._together :])
        return [size * parts for size in sizes if size]

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written after the last gather, or may have been; see `distrust`."""
        return not self._alias and self._gathered_version != self.shard._version

    def distrust(self) -> None:
        """The shard may be written from now on in ways that leave no trace.

        What an optimizer does to a DTensor counts no version of the memory below it.
        """
        self._gathered_version = -1

    @torch.no_grad()
    def gather(self, label: str, custom: CustomCollective | None = None) -> None:
        """Start to bring the whole line together, by ``custom`` where there is one."""
        if self._alias:
            return
        restore(self.full, self.layout.padded_size)
        kept, self._kept = self._kept, None
        if kept is not None and not self.is_stale:
            if custom is not None:
                self._gather_by(custom, kept[0], kept[1], label)
                self._staged_as_line = True
                return
            self._pending = [self._gather_into(kept[0], self.full, kept[1], label)]
            return
        self._gathered_version = self.shard._version
        shard = self.axes.shard
        if shard is None or shard.size == 1:
            self.full.copy_(self.shard)
            return
        if custom is not None:
            self._gather_by(custom, shard, self.shard, label)
            self._staged_as_line = self.is_direct
            return
        if self.is_direct:
            self._pending = [self._gather_into(shard, self.full, self.shard, label)]
            return
        packed = self.packed
        if packed:
            self._staging = self.full.new_empty(packed * shard.size)
            staged = self._gather_into(shard, self._staging, self.shard[:packed], label)
            self._pending.append(staged)
        for index in range(self._together, len(self._regions)):
            region, size = self._regions[index], self._sizes[index]
            start = self.layout.offsets[index]
            mine = self.shard[start : start + size]
            self._pending.append(self._gather_into(shard, region.view(-1), mine, label))

    def _gather_by(
        self, custom: CustomCollective, ranks: Communicator, mine: torch.Tensor, label: str
    ) -> None:
        """Gather all in one piece, in memory and by a call of the user's."""
        size = mine.numel() * ranks.size
        line = custom.allocate((size,), dtype=self.types.compute, device=self.device)
        place = line.view(ranks.size, -1)[ranks.rank]
        place.copy_(mine)
        self._staging = line
        self._pending.append(ranks.custom("all_gather", custom, line, place, label=label))

    def _gather_into(
        self, shard: Communicator, line: torch.Tensor, mine: torch.Tensor, label: str
    ) -> Pending:
        """Gather every rank's ``mine`` into ``line``, in place from this rank's own part of it."""
        place = line.view(shard.size, -1)[shard.rank]
        # Where the shard lives on the CPU this is its way to the device.
        place.copy_(mine, non_blocking=self.types.is_pinned)
        return shard.all_gather(line, place, label=label)

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Wait for the whole line."""
        while self._pending:
            self._pending.pop(0).wait()
        if self._staging is not None:
            if self._staged_as_line:
                self.full.copy_(self._staging)
            else:
                self._copy_out(self._staging)
            self._staging, self._staged_as_line = None, False

    @torch.no_grad()
    def keep(self, block: Communicator) -> None:
        """Keep a part of the whole line such that the ranks of ``block`` hold it together.

        The next `gather` runs over them only, unless the shard has been written by then. Parts are
        cut from the line as it lies, whatever the layout: nothing is copied out afterwards.
        """
        if not self._alias:
            self._kept = block, self.full.view(block.size, -1)[block.rank].clone()

    def forget_kept(self) -> None:
        """Gather over all ranks the next time."""
        self._kept = None

    def release(self) -> None:
        """Give the memory of the whole line back."""
        if not self._alias:
            free(self.full)

    # ------------------------------------------------------------------------- gradients

    @property
    def has_gradient(self) -> bool:
        """Whether ``gradient`` holds something."""
        return not is_free(self.gradient)

    @torch.no_grad()
    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put whole gradients of all tensors (zeros for None) in place, or add them."""
        if self.has_gradient:
            self._add(gradients)
            return
        restore(self.gradient, self.layout.padded_size)
        if None in gradients or self._has_padding:
            self.gradient.zero_()
        targets, sources = self._pairs(gradients)
        if targets:
            torch._foreach_copy_(targets, sources)

    def gradient_parts(self) -> list[list[torch.Tensor]]:
        """For each tensor the places in ``gradient`` that hold its gradient."""
        return [[target for target, _ in slot] for slot in self._slots]

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        targets, sources = self._pairs(gradients)
        if targets:
            torch._foreach_add_(targets, sources)

    def _pairs(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot, gradient in zip(self._slots, gradients, strict=True):
            if gradient is None:
                continue
            for target, place in slot:
                targets.append(target)
                if place is None:
                    sources.append(gradient)
                elif isinstance(place, tuple):
                    sources.append(gradient[place])
                else:
                    sources.append(gradient.reshape(place))
        return targets, sources

    # --------------------------------------------------------------------------- private

    @property
    def _is_on_dim_0(self) -> bool:
        return isinstance(self.layout, ChunkedLayout) and not any(self.layout.dims)

    @property
    def _has_padding(self) -> bool:
        return self.layout.padded_size != self.layout.numel

    def _view(self, index: int) -> torch.Tensor:
        shape = self.layout.shapes[index]
        start = self.layout.offsets[index]
        if isinstance(self.layout, ChunkedLayout):
            start *= self.layout.parts
        # `.data` has a version counter of its own: a gather does not look like a change of what
        # autograd has saved.
        return self.full[start : start + math.prod(shape)].view(shape).data

    def _rank_major_regions(self) -> list[torch.Tensor]:
        """For each tensor its place in ``full``, seen as (parts, slot)."""
        layout = self.layout
        if not isinstance(layout, ChunkedLayout):
            raise InternalError("a packed line needs no staging")
        starts = [offset * layout.parts for offset in layout.offsets]
        return [
            self.full[start : start + slot * layout.parts].view(layout.parts, slot)
            for start, slot in zip(starts, layout.slots, strict=True)
        ]

    def _copy_out(self, staging: torch.Tensor) -> None:
        layout = self.layout
        if not isinstance(layout, ChunkedLayout):
            raise InternalError("a packed line needs no staging")
        rows = staging.view(layout.parts, -1)
        is_all = staging.numel() == layout.padded_size
        count = len(self.views) if is_all else self._together
        if self._is_on_dim_0:
            sizes, regions = self._sizes[:count], self._regions[:count]
            torch.split_with_sizes_copy(rows, sizes, dim=1, out=regions)
            return
        for index, view in enumerate(self.views[:count]):
            start = layout.offsets[index]
            for part in range(layout.parts):
                box = layout.box(index, part)
                chunk = rows[part, start : start + box.numel].view(box.shape)
                view[box.slices()].copy_(chunk)

    def _gradient_slots(self) -> list[list[_Place]]:
        """For each tensor: places in ``gradient``, and what of the tensor goes there."""
        layout = self.layout
        if isinstance(layout, FlatLayout):
            ranges = (layout.range(index) for index in range(len(layout.names)))
            return [
                [(self.gradient[start:stop].view(shape), None)]
                for (start, stop), shape in zip(ranges, layout.shapes, strict=True)
            ]
        parts = layout.parts
        rows = self.gradient.view(parts, -1)
        slots: list[list[_Place]] = []
        for index, (start, size) in enumerate(zip(layout.offsets, layout.slots, strict=True)):
            if layout.dims[index] == 0 and layout.shapes[index][0] % parts == 0:
                # Even chunks of rows: one strided copy for all ranks.
                slots.append([(rows[:, start : start + size], [parts, size])])
                continue
            boxes = ((part, layout.box(index, part)) for part in range(parts))
            slots.append(
                [
                    (rows[part, start : start + box.numel].view(box.shape), box.slices())
                    for part, box in boxes
                    if box.numel
                ]
            )
        return slots


def _gathered_together(layout: FlatLayout | ChunkedLayout, itemsize: int) -> int:
    """How many tensors are gathered in one piece: all but large ones at the end of the line.

    A large tensor that is cut along dim 0 is gathered by itself, straight to where it belongs: that
    saves a staging line of its size and the copy out of it.
    """
    count = len(layout.names)
    if not isinstance(layout, ChunkedLayout):
        return count
    sizes, dims = layout.slots, layout.dims
    while count and not dims[count - 1] and sizes[count - 1] * layout.parts * itemsize >= ALONE:
        count -= 1
    return count


def _is_one_line(layout: ChunkedLayout) -> bool:
    """Whether gathered chunks of the one tensor lie as the tensor does."""
    return layout.parts == 1 or (len(layout.names) == 1 and layout.dims[0] == 0)


def _shard(numel: int, types: BufferTypes, device: torch.device) -> torch.Tensor:
    home = types.home or device
    pins = types.is_pinned and home.type == "cpu" and device.type == "cuda"
    return torch.zeros(numel, dtype=types.master, device=home, pin_memory=pins)


def _line(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def free(line: torch.Tensor) -> None:
    """Give the memory of ``line`` back; its views stay valid for the next `restore`."""
    storage = line.untyped_storage()
    if storage.size():
        storage.resize_(0)


def restore(line: torch.Tensor, numel: int) -> None:
    """Give ``line`` memory for ``numel`` elements, uninitialised."""
    storage = line.untyped_storage()
    size = numel * line.element_size()
    if storage.size() != size:
        storage.resize_(size)


def is_free(line: torch.Tensor) -> bool:
    """Whether ``line`` has no memory now."""
    return line.numel() > 0 and line.untyped_storage().size() == 0
