"""One flat buffer on the data axes: a shard at rest, the whole buffer when gathered.

There are two layouts. Packed: the buffer is split at any element, and the gather writes directly
into ``full``, whose views are the tensors. Chunked: each shard holds a chunk of every tensor;
gathered chunks arrive rank by rank in a staging buffer and are copied out to the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from meshwright.comm import Communicator, Pending
from meshwright.comm.dtensors.dtensor import beginning_piece
from meshwright.comm.memory.reusable_storage import Line, line_of
from meshwright.comm.streams import is_host
from meshwright.layout import LineLayout, contiguous_strides
from meshwright.torch_internals.tensors import foreach_copy_, split_into, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxes:
    """The axes of one unit's parameters. One of them may be missing."""

    shard: Communicator | None = None
    """Its ranks hold different parts; None where every rank holds the whole."""
    replicate: Communicator | None = None
    """Its ranks hold the same part; None where there is only one holder of each."""
    exchange: Communicator | None = None
    """Samples travel over it: its ranks hold other experts, each with the gradient of them all."""

    parts: int = field(init=False, repr=False, compare=False)
    """The number of shards that a line is split into."""
    part: int = field(init=False, repr=False, compare=False)
    """The number of the shard that this rank holds."""
    is_cut: bool = field(init=False, repr=False, compare=False)
    """True when parameters have to be gathered, and gradients scattered."""
    size: int = field(init=False, repr=False, compare=False)
    """The number of ranks whose gradients are summed, here or by an exchange: the divisor."""
    communicators: tuple[Communicator, ...] = field(init=False, repr=False, compare=False)
    """The axes to sum over, shard first."""
    reached: tuple[Communicator, ...] = field(init=False, repr=False, compare=False)
    """These, and ``exchange``: the axes to all ranks whose gradients are in a sum."""

    def __post_init__(self) -> None:
        there = tuple(axis for axis in (self.shard, self.replicate) if axis is not None)
        object.__setattr__(self, "parts", 1 if self.shard is None else self.shard.size)
        object.__setattr__(self, "is_cut", self.shard is not None and not self.shard.is_alone)
        object.__setattr__(self, "part", 0 if self.shard is None else self.shard.rank)
        reached = there if self.exchange is None else (*there, self.exchange)
        object.__setattr__(self, "size", math.prod(axis.size for axis in reached))
        object.__setattr__(self, "communicators", there)
        object.__setattr__(self, "reached", reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTypes:
    """The dtypes of one buffer."""

    master: torch.dtype
    """Of the shard that the optimizer steps."""
    compute: torch.dtype
    """Of the gathered parameters."""
    reduce: torch.dtype
    """In which gradients are summed."""
    asked: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    """``compute`` and ``reduce`` as asked for; None follows the one before."""

    @classmethod
    def of(
        cls, master: torch.dtype, compute: torch.dtype | None, reduce: torch.dtype | None
    ) -> BufferTypes:
        """Choose dtypes: ``compute`` defaults to ``master``, ``reduce`` to ``compute``.

        Tensors that are not floating-point, complex ones included, keep their dtype.
        """
        if not master.is_floating_point:
            return cls(master=master, compute=master, reduce=master, asked=(compute, reduce))
        asked, compute = (compute, reduce), compute or master
        return cls(master=master, compute=compute, reduce=reduce or compute, asked=asked)


class CustomCollective(Protocol):
    """A user-defined gather or reduce-scatter, by the protocol of torch's `fully_shard`."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate memory for what is sent and received."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any) -> Any:  # noqa: ANN401
        """Communicate. A gather gets ``async_op`` and may return a work to wait for; a
        reduce-scatter gets ``op`` and returns when done.
        """


ALONE = 2**20
"""Bytes from which a tensor is gathered by itself, between ranks on hosts."""
SHARED = 2**16
"""Bytes from which a shard lies in memory that the ranks of a host share."""

_Move: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One gather: the line that it fills, this rank's place in it, and what belongs there."""


class Moves(NamedTuple):
    """Collectives over the same ranks, coalesced into one launch."""

    ranks: Communicator
    outputs: list[torch.Tensor]
    tensors: list[torch.Tensor]
    """For each output, what this rank gives."""

    @staticmethod
    def joined(found: Sequence[Moves]) -> list[Moves]:
        """Coalesce collectives over the same ranks."""
        joined: dict[Communicator, Moves] = {}
        for moves in found:
            known = joined.setdefault(moves.ranks, Moves(moves.ranks, [], []))
            known.outputs.extend(moves.outputs)
            known.tensors.extend(moves.tensors)
        return list(joined.values())


class PackKey(NamedTuple):
    """The properties that buffers must share to be gathered together on a device."""

    ranks: Communicator
    is_kept: bool
    """True where the parts among fewer ranks are gathered; see `FlatBuffer.keep`."""
    dtype: torch.dtype
    device: torch.device


class Stretches(NamedTuple):
    """The sizes of adjacent ranges in a row, and the destination of each."""

    sizes: list[int]
    places: list[torch.Tensor]

    def fill(self, rows: torch.Tensor) -> None:
        """Copy ``rows``, one per rank, to the destinations in one operation."""
        split_into(rows, self.sizes, 1, out=self.places)


_Copies: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets, and the sources that are copied to them."""


class FlatBuffer:
    """The storage of one group of parameters; its `Unit` decides when to gather and free it.

    A new one has memory for the whole buffer, so that views can be made, until `release`.
    """

    wholes: Sequence[nn.Parameter] = ()
    """Whole parameters that are made of what was gathered, where views of it are not enough."""

    def __init__(
        self,
        layout: LineLayout,
        axes: DataAxes,
        types: BufferTypes,
        device: torch.device,
        shard: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.axes = axes
        self.types = types
        self.device = device
        """The device of the gathered parameters and their gradients."""
        self.is_on_host = is_host(device)
        if shard is None:
            shard = _shard(layout.shard_size, types.master, device, axes.shard)
        self.shard = shard
        """This rank's part, in the optimizer's dtype; perhaps on another device (offloaded)."""
        is_here = is_host(shard.device) == self.is_on_host
        self.is_copy = axes.is_cut or types.master != types.compute or not is_here
        """True when whole tensors have memory of their own, and not that of the shard."""
        self.is_direct = layout.is_gathered_whole
        """True when what is gathered lies as the tensors do."""
        self._whole: Line | None = None
        if self.is_copy:
            self._whole = line_of(layout.padded_size, types.compute, device)
        self.full = self.shard if self._whole is None else self._whole.tensor
        """The whole line; without memory between `gather` and `release`."""
        # A device takes much longer for several operations than for one of as many bytes.
        is_packed = axes.shard is not None and not axes.shard.is_on_host
        least = math.inf if is_packed else -(-ALONE // types.compute.itemsize)
        self._together = layout.together(least)
        self._comes_staged = not self.is_direct and self._together == len(layout.names)
        """True when every tensor is gathered into ``_staging``, and copied from there."""
        self._incoming: torch.Tensor | None = None
        """What the gather in flight fills, if that is not ``full``: it is copied from there."""
        self._kept: tuple[Communicator, torch.Tensor] | None = None
        """This rank's part of the whole line among fewer ranks, between two uses; see `keep`."""
        self._held: object = None
        """Keeps that alive while a gather reads it."""
        self.gathered_version = -1
        """The version of the shard at the last `gather`; -1 from when writes may leave no trace: an
        optimizer that writes to a DTensor does not bump the version of the memory below it."""

    # What only passes need is made in the first one. That may be an evaluation in inference mode,
    # whose tensors autograd could not use later. Views are made while there is memory: torch
    # refuses one that reaches beyond the end of its storage.

    @cached_property
    def _staging(self) -> Line:
        """Staging memory of tensors that are gathered together, before they are copied out."""
        with torch.inference_mode(False):
            size = 0 if self.is_direct else self.packed * self.axes.parts
            staging = line_of(size, self.types.compute, self.device)
        staging.free()
        return staging

    @cached_property
    def _moves(self) -> tuple[list[torch.Tensor], tuple[_Move, ...]]:
        """The buffers that a gather fills, and its collectives; made while these have memory."""
        with torch.inference_mode(False), torch.no_grad():
            moves = self._plan_moves()
        return [line for line, _, _ in moves], tuple(moves)

    @cached_property
    def _copies(self) -> _Copies:
        """The copies out of ``_staging``; made while it and ``full`` have memory."""
        with torch.inference_mode(False), torch.no_grad():
            return self._copies_from(self._staging.tensor, self._together)

    @cached_property
    def stretches(self) -> Stretches | None:
        """The ranges of a shard, in order, with their places; made while ``full`` has memory.

        None where several copies are used instead: on hosts, with a copy per tensor, and where a
        chunk is not contiguous in its tensor.
        """
        layout, parts = self.layout, self.axes.parts
        with torch.inference_mode(False), torch.no_grad():
            if self.is_on_host or not layout.shard_size:
                return None
            if self.is_direct:
                return self.stretches_of(parts)
            chunked = layout.chunked_layout()
            if any(chunked.dims):
                return None
            sizes, at = list[int](), 0
            for start, size in zip(chunked.offsets, chunked.sizes, strict=True):
                # What lies in a gap of a shard goes to the gap between the whole tensors.
                sizes += [each for each in (start - at, size) if each]
                at = start + size
            regions = self.full.split([size * parts for size in sizes])
            return Stretches(sizes, [region.view(parts, -1) for region in regions])

    def stretches_of(self, parts: int) -> Stretches:
        """The only range, of a buffer that is split into ``parts`` in place."""
        return Stretches([self.full.numel() // parts], [self.full.view(parts, -1)])

    # ------------------------------------------------------------------------ parameters

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this rank's part of full tensors into the shard; None leaves a part unchanged."""
        places: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for cut in self.layout.cuts(self.axes.part):
            tensor = tensors[cut.index]
            if tensor is not None:
                places.append(_piece(self.shard, cut.offset, cut.shape))
                tensor = tensor if cut.of == tensor.shape else tensor.reshape(cut.of)
                parts.append(tensor.narrow(cut.dim, cut.start, cut.shape[cut.dim]))
        if places:
            foreach_copy_(places, parts)

    def view(self, index: int) -> torch.Tensor:
        """Return full tensor ``index`` as a view of ``full`` with its own version counter."""
        # So a gather does not look like a change of what autograd has saved.
        return self._place(index).data

    def distance(self, index: int) -> int | None:
        """The offset in bytes of tensor ``index`` in ``full``; None if it has no elements."""
        is_empty = 0 in self.layout.shapes[index]
        return None if is_empty else self.layout.whole_start(index) * self.full.itemsize

    def local(self, index: int) -> torch.Tensor:
        """This rank's chunk of tensor ``index``: a view of the shard. For chunked layouts."""
        shape = self.layout.chunked_layout().local_shape(index, self.axes.part)
        return _piece(self.shard, self.layout.offsets[index], shape)

    def around(self, index: int) -> torch.Tensor:
        """This rank's chunk of tensor ``index`` as users see it, in the shard's memory."""
        shape = self.layout.chunked_layout().local_shape(index, self.axes.part)
        return beginning_piece(self.shard, self.layout.offsets[index], shape)

    def own(self, index: int, line: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's elements of tensor ``index``, 1-D: a view of the shard, or of ``line``."""
        line = self.shard if line is None else line
        return line[slice(*self.layout.own_range(index, self.axes.part))]

    @property
    def packed(self) -> int:
        """The number of shard elements that are gathered together; others are gathered alone."""
        if self.is_direct:
            return self.layout.shard_size
        return self.layout.stretch(range(self._together))[1] if self._together else 0

    @property
    def pieces(self) -> list[range]:
        """The tensors that each collective moves: small ones together, then each large one."""
        count = len(self.layout.names)
        together = count if self.is_direct else self._together
        pieces = [range(together)] if together else []
        return pieces + [range(index, index + 1) for index in range(together, count)]

    @property
    def gathered(self) -> int:
        """The number of elements that a gather of the whole buffer moves."""
        if self.is_direct:
            return self.layout.padded_size
        alone = self.layout.chunked_layout().sizes[self._together :]
        return self.axes.parts * (self.packed + sum(alone))

    @property
    def is_stale(self) -> bool:
        """True when the shard was, or may have been, written since `gather`."""
        return self.is_copy and self.gathered_version != version_of(self.shard)

    def gather(
        self, label: str, started: list[Pending], custom: CustomCollective | None = None
    ) -> Moves | None:
        """Prepare to gather the whole buffer; the caller launches the returned collectives.

        ``custom``, where given, gathers at once, and its pending work is added to ``started``.
        """
        if self._whole is None:
            return None
        kept, self._kept = self._kept, None
        if kept is not None and self.is_stale:
            kept = None
        self._held = kept
        if kept is not None:
            ranks, mine = kept
            if custom is not None:
                self._incoming = self._gather_by(custom, ranks, mine, label, started)
                return None
            self._whole.restore()
            place = self.full.view(ranks.size, -1)[ranks.rank]
            place.copy_(mine)
            return Moves(ranks, [self.full], [place])
        self.gathered_version = version_of(self.shard)
        shard = self.axes.shard
        if shard is None or not self.axes.is_cut:
            self._whole.restore()
            self.full.copy_(self.shard)
            return None
        if custom is not None:
            self._whole.restore()
            self._incoming = self._gather_by(custom, shard, self.shard, label, started)
            return None
        if not self.is_direct and self._together:
            self._staging.restore()
            self._incoming = self._staging.tensor
        if not self._comes_staged:
            self._whole.restore()  # else in `finish_gather`: both have memory only briefly
        given: list[torch.Tensor] = []
        outputs, moves = self._moves
        for line, place, mine in moves:
            # A shard of another dtype or device goes by way of this rank's own part of the line.
            if mine.dtype != line.dtype or mine.device != line.device:
                place.copy_(mine, non_blocking=True)
                mine = place
            given.append(mine)
        return Moves(shard, outputs, given) if given else None

    @property
    def pack_key(self) -> PackKey | None:
        """Return what buffers that are gathered together must share; see `GatherPack`.

        None where this one is gathered by itself: each rank holds it whole, or a chunk is not
        contiguous in its tensor.
        """
        kept, shard, layout = self._kept, self.axes.shard, self.layout
        if shard is None or not self.axes.is_cut or not layout.shard_size:
            return None
        if layout.cuts_dims and any(layout.chunked_layout().dims):
            return None
        is_kept = kept is not None and not self.is_stale
        return PackKey(kept[0] if is_kept else shard, is_kept, self.types.compute, self.device)

    def give(self) -> torch.Tensor:
        """Provide this rank's part for a gather by `GatherPack`."""
        kept, self._kept = self._kept, None
        if kept is not None and self.is_stale:
            kept = None
        self._held = kept
        if kept is not None:
            return kept[1]
        self.gathered_version = version_of(self.shard)
        return self.shard

    def restore(self) -> None:
        """Allocate memory for the whole buffer."""
        if self._whole is not None:
            self._whole.restore()

    def finish_gather(self, before_freeing: Callable[[], None] | None = None) -> None:
        """Copy gathered elements to their places in ``full``.

        ``before_freeing`` is called after the copies are issued, before memory is freed.
        """
        line, self._incoming = self._incoming, None
        if line is not None and self._whole is not None:
            self._whole.restore()
            if self.is_direct or self._held is not None:
                self.full.copy_(line)
            elif self.stretches is not None:
                self.stretches.fill(line.view(self.axes.parts, -1))
            else:
                is_staged = line is self._staging.tensor
                count = len(self.layout.names)
                targets, sources = self._copies if is_staged else self._copies_from(line, count)
                if targets:
                    foreach_copy_(targets, sources)
            if before_freeing is not None:
                before_freeing()
            self._staging.free()
        self._held = None

    @torch.no_grad()
    def keep(self, block: Communicator) -> None:
        """Keep a part of the whole buffer such that the ranks of ``block`` together hold all of it.

        The next `gather` runs over them only, unless the shard has been written by then. The buffer
        is split in place, whatever the layout: nothing is copied out afterwards.
        """
        if self.is_copy:
            self._kept = block, self.full.view(block.size, -1)[block.rank].clone()

    def forget_kept(self) -> None:
        """Gather over all ranks the next time."""
        self._kept = None

    def lends(self, address: int) -> bool:
        """Whether `release` frees the memory at ``address``."""
        if self._whole is None:
            return False
        start = self.full.data_ptr()
        return 0 < start <= address < start + self.full.nbytes

    def release(self) -> None:
        """Free the memory of the whole buffer."""
        if self._whole is not None:
            self._whole.free()

    # --------------------------------------------------------------------------- private

    def _place(self, index: int) -> torch.Tensor:
        start, shape = self.layout.whole_start(index), self.layout.shapes[index]
        line = self.full[start : start + math.prod(shape)]
        return line if len(shape) == 1 else line.view(shape)

    def _plan_moves(self) -> list[_Move]:
        """List the gathers: directly into ``full``, or small tensors through ``_staging``."""
        parts, part = self.axes.parts, self.axes.part
        if self.is_direct:
            return [(self.full, self.full.view(parts, -1)[part], self.shard)]
        packed = self.packed
        moves: list[_Move] = []
        if packed:
            staging = self._staging.tensor
            moves.append((staging, staging.view(parts, -1)[part], self.shard[:packed]))
        for index in range(self._together, len(self.layout.names)):
            layout = self.layout.chunked_layout()
            start, size = layout.offsets[index], layout.sizes[index]
            first = layout.whole_start(index)
            region = self.full[first : first + size * parts]
            mine = self.shard[start : start + size]
            moves.append((region, region[part * size : (part + 1) * size], mine))
        return moves

    @torch.no_grad()
    def _gather_by(
        self,
        custom: CustomCollective,
        ranks: Communicator,
        mine: torch.Tensor,
        label: str,
        started: list[Pending],
    ) -> torch.Tensor:
        """Start one gather of everything by the user's ``custom``; returns the buffer it fills."""
        size = mine.numel() * ranks.size
        line = custom.allocate((size,), dtype=self.types.compute, device=self.device)
        place = line.view(ranks.size, -1)[ranks.rank]
        place.copy_(mine)
        started.append(ranks.custom("all_gather", custom, line, place, label=label))
        return line

    def _copies_from(self, line: torch.Tensor, count: int) -> _Copies:
        """List the copies out of ``line``, which holds the first ``count`` gathered tensors."""
        layout, width = self.layout.chunked_layout(), line.numel() // self.layout.parts
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index in range(count):
            start, size = layout.offsets[index], layout.sizes[index]
            first = layout.whole_start(index)
            if not layout.dims[index]:
                place = self.full[first : first + size * layout.parts]
                targets.append(place.view(layout.parts, size))
                sources.append(line.view(layout.parts, width)[:, start : start + size])
                continue
            for part in range(layout.parts):
                at = part * width + start
                box = layout.box(index, part)
                if box.numel:
                    # A place in `full`: what autograd has saved of `view` must not look changed.
                    targets.append(self._place(index)[box.slices()])
                    sources.append(line[at : at + box.numel].view(box.shape))
        return targets, sources


class GatherPack:
    """Buffers of one unit and dtype over the same ranks, gathered on a device in one operation.

    ::

        a row, of one rank    | shard of buffer 0 | shard of buffer 1 |

    Used for trainable parameters beside frozen ones, which have separate buffers, since only the
    gradients of the trainable ones are reduced.
    """

    def __init__(self, key: PackKey, buffers: list[FlatBuffer]) -> None:
        self.buffers = buffers
        self._is_kept, ranks = key.is_kept, key.ranks
        self._ranks = ranks
        widths = [
            b.full.numel() // ranks.size if key.is_kept else b.layout.shard_size for b in buffers
        ]
        with torch.inference_mode(False), torch.no_grad():
            self._line = line_of(sum(widths) * ranks.size, key.dtype, key.device)
            self._rows = self._line.tensor.view(ranks.size, -1)
            self._own = self._rows[ranks.rank]
            self._places = self._own.split(widths)
        self._stretches: Stretches | None = None

    def gather(self) -> Moves:
        """Prepare to gather all buffers; the caller launches the returned collectives."""
        self._line.restore()
        given = [buffer.give() for buffer in self.buffers]
        if given[0].device == self._own.device:
            foreach_copy_(self._places, given)
        else:  # from the host
            for place, mine in zip(self._places, given, strict=True):
                place.copy_(mine, non_blocking=True)
        return Moves(self._ranks, [self._line.tensor], [self._own])

    def finish(self, before_freeing: Callable[[], None]) -> None:
        """Copy what was gathered to its places; see `FlatBuffer.finish_gather`."""
        for buffer in self.buffers:
            buffer.restore()
        found = self._stretches
        if found is None:
            found = self._stretches = Stretches([], [])
            for buffer in self.buffers:
                own = None if self._is_kept else buffer.stretches
                own = own or buffer.stretches_of(self._ranks.size)
                found.sizes.extend(own.sizes)
                found.places.extend(own.places)
        found.fill(self._rows)
        before_freeing()
        self._line.free()


def _piece(line: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """View the elements of 1-D ``line``, which has memory, from ``start`` on as a tensor."""
    return line.as_strided(shape, contiguous_strides(shape), line.storage_offset() + start)


def _shard(
    numel: int, dtype: torch.dtype, device: torch.device, axis: Communicator | None
) -> torch.Tensor:
    """Make a shard of zeros, where it pays in memory that ranks of ``axis`` read directly."""
    is_small = numel * dtype.itemsize < SHARED
    if is_small or axis is None or axis.is_on_host != is_host(device):
        return torch.zeros(numel, dtype=dtype, device=device)
    return axis.empty_shared(numel, dtype).zero_()
