"""The collectives of a group whose ranks share memory.

Each is a generator: code between two ``yield`` never blocks, and every ``yield`` means "when all
ranks have arrived at this step". Data is staged in slots; each rank has one for even and one for
odd steps. Data of step k is read until its readers arrive at k + 1, so that the slot is free again
for k + 2 without a further wait.

::

    small     copy in -> step -> check the records, read the slots of all ranks
    staged    the same, chunk by chunk
    in place  step -> check -> read and write the peers' tensors themselves -> step

A tensor in shared memory (see `SharedTensors`) is read in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from meshwright.comm.shared_memory.arena import Location, SharedTensors
from meshwright.comm.shared_memory.buffers import bytes_of, flat, over
from meshwright.comm.shared_memory.fingerprints import RecordedCall, Records
from meshwright.comm.shared_memory.reductions import accumulate
from meshwright.comm.shared_memory.waits import Meeting, Steps

Part = tuple[int, int]
"""Address and number of bytes."""

SLOT_BYTES = 2 << 20
"""Staged data of one rank and step. A group stages at most twice this for each rank."""
DIRECT_BYTES = 256 << 10
"""Up to this size, every rank reduces all of a tensor instead of its share only."""
LOCATE_BYTES = 64 << 10
"""Above this size it pays to read a peer's tensor in place."""
BLOCK_BYTES = 256 << 10
"""Reductions in place go in blocks that stay in a core's cache."""
VIEWS = 8192
"""Views of memory that are remembered."""

_copy = ctypes.memmove


class Exchange:
    """The staged memory of a group, and the algorithms on it. One thread of a rank at a time."""

    def __init__(self, meeting: Meeting, tensors: SharedTensors) -> None:
        layout, address = meeting.layout, meeting.segment.address
        self.meeting = meeting
        self.records = Records(meeting)
        self.rank = meeting.peers.me
        self.size = layout.size
        self._tensors = tensors
        self._others = tuple(rank for rank in range(self.size) if rank != self.rank)
        self._slots = tuple(
            tuple(address + layout.slot(rank, parity) for rank in range(self.size))
            for parity in (0, 1)
        )
        self._direct_bytes = min(2 * DIRECT_BYTES // self.size, SLOT_BYTES)
        self._piece = SLOT_BYTES // max(1, self.size - 1) // 64 * 64
        """Bytes of a slot for each other rank."""
        self._part = SLOT_BYTES // self.size // 64 * 64
        """The same when a slot also carries a result."""
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    # ------------------------------------------------------------------ steps and memory

    def _view(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a cached tensor over ``numel`` elements of shared memory, outside autograd.

        It keeps no mapping alive. It is used only for an address that is mapped in this step, and
        then shows the current mapping, as a new one would.

        Not for other memory: a gradient has another address in each step, and the cached objects
        would take small pieces of C's heap between large ones, which then never fit a gradient.
        """
        view = self._views.get((address, numel, dtype))
        if view is None:
            if len(self._views) >= VIEWS:
                self._views.clear()
            view = self._views[(address, numel, dtype)] = over(address, numel, dtype)
        return view

    def _next(self) -> tuple[int, ...]:
        """List the slots of all ranks for the next step."""
        return self._slots[(self.meeting.step + 1) & 1]

    def _enter(self, call: RecordedCall, source: Location | None = None) -> int:
        """Arrive with the record of ``call``; returns the parity of the step."""
        parity = (self.meeting.step + 1) & 1
        self.records.write(parity, call, source)
        self.meeting.arrive()
        return parity

    def _locate(self, address: int, nbytes: int) -> Location | None:
        return self._tensors.locate(address) if nbytes > LOCATE_BYTES else None

    def _places(self, parity: int, own: int) -> list[int | None]:
        """List the local address of each rank's input; None where it must be staged."""
        places: list[int | None] = []
        for rank in range(self.size):
            location = self.records.source(parity, rank)
            if location is None:
                places.append(None)
            elif rank == self.rank:
                places.append(own)
            else:
                places.append(self._tensors.address_of(self.meeting.peers.pids[rank], location))
        return places

    # ------------------------------------------------------------------ barrier

    def barrier(self, call: RecordedCall) -> Steps:
        """Wait for all ranks."""
        parity = self._enter(call)
        yield
        self.records.check(parity, call)

    # ------------------------------------------------------------------ all_reduce

    def all_reduce(self, call: RecordedCall, tensor: torch.Tensor) -> Steps:
        """Reduce ``tensor`` over all ranks, in place."""
        numel, nbytes, address = tensor.numel(), tensor.nbytes, tensor.data_ptr()
        located = self._locate(address, nbytes)
        is_direct = nbytes <= self._direct_bytes
        slots = self._next()
        if located is None:
            if is_direct:
                _copy(slots[self.rank], address, nbytes)
            else:
                self._stage_round(slots[self.rank], address, nbytes, 0)
        parity = self._enter(call, located)
        yield
        self.records.check(parity, call)
        places: list[int] = []
        # From here on all ranks choose alike: the check has shown that their shapes are the same,
        # and all read the same locations.
        if nbytes > LOCATE_BYTES:
            places = [place for place in self._places(parity, address) if place is not None]
        if is_direct and not places:
            if numel:
                views = [self._view(slot, numel, tensor.dtype) for slot in slots]
                accumulate(flat(tensor), views, call.reduction)
        elif len(places) == self.size:
            self._reduce_share(call, places, numel, tensor.dtype)
            # Until all have arrived, peers write to this rank's tensor.
            self.meeting.arrive()
            yield
        else:
            staged = None if places else slots
            yield from self._all_reduce_staged(call, tensor, staged)

    def _reduce_share(
        self, call: RecordedCall, places: Sequence[int], numel: int, dtype: torch.dtype
    ) -> None:
        """Reduce this rank's share of tensors in place, and copy it to all of them."""
        start, stop = _share(numel, self.rank, self.size)
        block, width = BLOCK_BYTES // dtype.itemsize, dtype.itemsize
        for first in range(start, stop, block):
            count = min(block, stop - first)
            sources = [place + first * width for place in places]
            views = [self._view(source, count, dtype) for source in sources]
            # Into the first rank's tensor: no other rank reads or writes this range of any.
            accumulate(views[0], views, call.reduction, alias=0)
            for source in sources[1:]:
                _copy(source, sources[0], count * width)

    def _stage_round(self, slot: int, address: int, total: int, turn: int) -> None:
        """Copy into this rank's slot the pieces that other ranks reduce in round ``turn``."""
        piece = self._part
        for place, rank in enumerate(self._others):
            start, nbytes = _cut(address, total, turn, piece, rank, self.size)
            _copy(slot + place * piece, start, nbytes)

    def _all_reduce_staged(
        self, call: RecordedCall, tensor: torch.Tensor, staged: Sequence[int] | None
    ) -> Steps:
        """Work in rounds: a slot carries the pieces of one round and the result of the previous.

        ``staged`` are the slots that already hold the pieces of the first round.

        ::

            slot of rank r:  | its pieces for the other ranks, round k | its result, round k - 1 |
        """
        elements, address, total = flat(tensor), tensor.data_ptr(), tensor.nbytes
        piece = self._part
        rounds = -(-total // (piece * self.size))
        results = piece * (self.size - 1)
        before = self._next() if staged is None else staged
        for k in range(0 if staged is None else 1, rounds + 1):
            slots = self._next()
            if k > 0:
                start, nbytes = _cut(0, total, k - 1, piece, self.rank, self.size)
                self._reduce_piece(call, bytes_of(elements, start, nbytes), before, slots)
            if k < rounds:
                self._stage_round(slots[self.rank], address, total, k)
            self.meeting.arrive()
            yield
            if k > 0:
                for rank in self._others:
                    start, nbytes = _cut(address, total, k - 1, piece, rank, self.size)
                    _copy(start, slots[rank] + results, nbytes)
            before = slots

    def _reduce_piece(
        self, call: RecordedCall, own: torch.Tensor, before: Sequence[int], slots: Sequence[int]
    ) -> None:
        if not own.numel():
            return
        piece = self._part
        sources = [
            own
            if rank == self.rank
            else self._view(before[rank] + self._place_in(rank) * piece, own.numel(), own.dtype)
            for rank in range(self.size)
        ]
        accumulate(own, sources, call.reduction, alias=self.rank)
        _copy(slots[self.rank] + piece * (self.size - 1), own.data_ptr(), own.nbytes)

    def _place_in(self, rank: int) -> int:
        """Return the position of this rank's piece in the slot of ``rank``."""
        return self.rank if self.rank < rank else self.rank - 1

    # ------------------------------------------------------------------ reduce_scatter

    def reduce_scatter(
        self, call: RecordedCall, output: torch.Tensor, tensor: torch.Tensor
    ) -> Steps:
        """Reduce ``tensor``, which holds a share for each rank, into this rank's ``output``."""
        share, nbytes, address = output.nbytes, tensor.nbytes, tensor.data_ptr()
        inside = address <= output.data_ptr() < address + nbytes
        # An output inside of the input may cover any source: an alias behind the last one has
        # `accumulate` sum elsewhere, and copy.
        alias = self.size if inside else None
        own = bytes_of(flat(tensor), self.rank * share, share)
        located = self._locate(address, nbytes)
        is_direct = nbytes <= self._direct_bytes
        slots = self._next()
        if located is None and is_direct:
            before, after = self.rank * share, (self.rank + 1) * share
            _copy(slots[self.rank], address, before)
            _copy(slots[self.rank] + after, address + after, nbytes - after)
        elif located is None:
            self._stage_shares(slots[self.rank], address, share, 0)
        parity = self._enter(call, located)
        yield
        self.records.check(parity, call)
        places: list[int] = []
        if nbytes > LOCATE_BYTES:
            places = [place for place in self._places(parity, address) if place is not None]
        if is_direct and not places:
            starts = [slot + self.rank * share for slot in slots]
            self._reduce_from(call, output, starts, alias, own)
            return
        if len(places) == self.size:
            starts = [place + self.rank * share for place in places]
            self._reduce_from(call, output, starts, alias)
            self.meeting.arrive()
            yield
            return
        if places:
            # The shares of those that have a place are not in their slots.
            slots = self._next()
            self._stage_shares(slots[self.rank], address, share, 0)
            self.meeting.arrive()
            yield
        yield from self._reduce_scatter_staged(call, output, address, own, slots, alias)

    def _reduce_from(
        self,
        call: RecordedCall,
        output: torch.Tensor,
        starts: Sequence[int],
        alias: int | None,
        own: torch.Tensor | None = None,
    ) -> None:
        """Reduce the data at ``starts``, one address for each rank, into ``output``.

        ``own`` is this rank's part if that is not in shared memory.
        """
        dtype, width = output.dtype, output.dtype.itemsize
        block = BLOCK_BYTES // width
        elements = flat(output)
        for first in range(0, output.numel(), block):
            target = elements[first : first + block]
            count = target.numel()
            views = [
                self._view(start + first * width, count, dtype)
                if own is None or rank != self.rank
                else own[first : first + count]
                for rank, start in enumerate(starts)
            ]
            accumulate(target, views, call.reduction, alias)

    def _stage_shares(self, slot: int, address: int, share: int, first: int) -> None:
        """Copy a piece of each other rank's share to this rank's slot, from byte ``first``."""
        for place, rank in enumerate(self._others):
            start = address + rank * share + first
            _copy(slot + place * self._piece, start, min(self._piece, share - first))

    def _reduce_scatter_staged(
        self,
        call: RecordedCall,
        output: torch.Tensor,
        address: int,
        own: torch.Tensor,
        slots: Sequence[int],
        alias: int | None,
    ) -> Steps:
        """Work in rounds; the pieces of the first are in ``slots`` already."""
        share, width, piece = output.nbytes, output.dtype.itemsize, self._piece
        elements = flat(output)
        for first in range(0, share, piece):
            if first:
                slots = self._next()
                self._stage_shares(slots[self.rank], address, share, first)
                self.meeting.arrive()
                yield
            starts = [slots[rank] + self._place_in(rank) * piece for rank in range(self.size)]
            part = slice(first // width, (first + piece) // width)
            self._reduce_from(call, elements[part], starts, alias, own[part])

    # ------------------------------------------------------------------ reduce

    def reduce(self, call: RecordedCall, tensor: torch.Tensor, root: int) -> Steps:
        """Reduce ``tensor`` over all ranks into the tensor of rank ``root``."""
        nbytes, address, width = tensor.nbytes, tensor.data_ptr(), tensor.dtype.itemsize
        elements, parity = flat(tensor), -1
        for first in range(0, max(nbytes, 1), SLOT_BYTES):
            count = min(SLOT_BYTES, nbytes - first)
            slots = self._next()
            _copy(slots[self.rank], address + first, count)
            if first == 0:
                parity = self._enter(call)
            else:
                self.meeting.arrive()
            yield
            if first == 0:
                self.records.check(parity, call)
            if self.rank == root and count:
                target = elements[first // width : (first + count) // width]
                self._reduce_from(call, target, slots, None)

    # ------------------------------------------------------------------ gathering

    def gather(
        self, call: RecordedCall, source: Part, sizes: Sequence[int], outputs: Sequence[int] | None
    ) -> Steps:
        """Copy the ``sizes[r]`` bytes of each rank r to ``outputs[r]``, on ranks that have outputs.

        Implements all_gather (all sizes, outputs on all ranks), broadcast (the root's size only)
        and gather (outputs at the root only).
        """
        address, nbytes = source
        located = self._locate(address, nbytes)
        parity = (self.meeting.step + 1) & 1
        slots = self._next()
        if located is None:
            _copy(slots[self.rank], address, min(nbytes, SLOT_BYTES))
        self._enter(call, located)
        yield
        self.records.check(parity, call)
        places = [None] * self.size
        if max(sizes) > LOCATE_BYTES:
            places = self._places(parity, address)
        if outputs is not None:
            for rank, place in enumerate(places):
                start = address if rank == self.rank else place
                if start is not None and sizes[rank] and outputs[rank] != start:
                    _copy(outputs[rank], start, sizes[rank])
        staged = max(
            [size for size, at in zip(sizes, places, strict=True) if at is None], default=0
        )
        for first in range(0, max(staged, 1), SLOT_BYTES):
            if first:
                slots = self._next()
                if located is None:
                    count = max(0, min(SLOT_BYTES, nbytes - first))
                    _copy(slots[self.rank], address + first, count)
                self.meeting.arrive()
                yield
            if outputs is not None:
                for rank in self._others:
                    count = min(SLOT_BYTES, sizes[rank] - first)
                    if places[rank] is None and count > 0:
                        _copy(outputs[rank] + first, slots[rank], count)
        # Tensors that were read in place must not change before all readers have arrived.
        if places.count(None) < len(places):
            self.meeting.arrive()
            yield

    # ------------------------------------------------------------------ exchanging

    def exchange(
        self, call: RecordedCall, parts: Sequence[Part], outputs: Sequence[Part], *, adjacent: bool
    ) -> Steps:
        """Copy part p of this rank to rank p, whose output for this rank has as many bytes.

        Implements all_to_all and scatter. Sizes may differ from rank to rank and may be zero.
        ``adjacent``: the parts are contiguous in memory, so that peers can find theirs.
        """
        sizes = [nbytes for _, nbytes in parts]
        located = self._locate(parts[0][0], sum(sizes)) if adjacent else None
        parity = (self.meeting.step + 1) & 1
        slots = self._next()
        if located is None:
            self._stage(slots[self.rank], parts, 0)
        self.records.write_notes(parity, sizes)
        self._enter(call, located)
        yield
        self.records.check(parity, call)
        notes = [self.records.notes(parity, rank) for rank in range(self.size)]
        self._check_sizes(parity, notes, outputs)
        places: list[int | None] = [None] * self.size
        if any(sum(note) > LOCATE_BYTES for note in notes):
            places = self._places(parity, parts[0][0])
        self._unstage(slots, outputs, places, 0)
        for rank in range(self.size):
            place = parts[rank][0] if rank == self.rank else places[rank]
            start, nbytes = outputs[rank]
            if place is not None and nbytes:
                skipped = 0 if rank == self.rank else sum(notes[rank][: self.rank])
                _copy(start, place + skipped, nbytes)
        longest = max(
            nbytes if places[rank] is None and peer != rank else 0
            for rank, note in enumerate(notes)
            for peer, nbytes in enumerate(note)
        )
        for first in range(self._piece, longest, self._piece):
            slots = self._next()
            if located is None:
                self._stage(slots[self.rank], parts, first)
            self.meeting.arrive()
            yield
            self._unstage(slots, outputs, places, first)
        if places.count(None) < len(places):
            self.meeting.arrive()
            yield

    def _stage(self, slot: int, parts: Sequence[Part], first: int) -> None:
        """Copy a piece of each part for another rank to this rank's slot, from byte ``first``."""
        piece = self._piece
        for place, rank in enumerate(self._others):
            start, nbytes = parts[rank]
            if nbytes > first:
                _copy(slot + place * piece, start + first, min(piece, nbytes - first))

    def _unstage(
        self,
        slots: Sequence[int],
        outputs: Sequence[Part],
        places: Sequence[int | None],
        first: int,
    ) -> None:
        """Copy this rank's pieces out of the slots of ranks whose input was staged."""
        piece = self._piece
        for rank in self._others:
            start, nbytes = outputs[rank]
            if places[rank] is None and nbytes > first:
                source = slots[rank] + self._place_in(rank) * piece
                _copy(start + first, source, min(piece, nbytes - first))

    def _check_sizes(
        self, parity: int, notes: Sequence[Sequence[int]], outputs: Sequence[Part]
    ) -> None:
        if [note[self.rank] for note in notes] == [nbytes for _, nbytes in outputs]:
            return
        numbers = self.meeting.peers.ranks
        for rank, note in enumerate(notes):
            if note[self.rank] != outputs[rank][1]:
                raise self.records.refuse(
                    parity,
                    f"rank {numbers[rank]} sends {note[self.rank]} bytes to rank "
                    f"{numbers[self.rank]}, which has room for {outputs[rank][1]}",
                )


def _share(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range that ``rank`` reduces, split at multiples of 64: no cache line is shared."""
    length = -(-numel // (size * 64)) * 64
    return min(rank * length, numel), min((rank + 1) * length, numel)


def _cut(address: int, total: int, turn: int, piece: int, rank: int, size: int) -> Part:
    """Find the piece that ``rank`` reduces in round ``turn``, cut at the end of the tensor."""
    first = min((turn * size + rank) * piece, total)
    return address + first, min(piece, total - first)
