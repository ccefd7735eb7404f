"""The memory of a simulated device: which work reads and writes it, in which order.

Two unordered accesses to the same bytes, one of them a write, are a fault; so is memory that is
freed while work that uses it may still run. The allocator of a GPU returns freed memory at once to
the stream that it was allocated on: later work of that stream may use it.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from meshwright.testing.simulated.operators import tensors_in
from meshwright.testing.simulated.streams import Stamp, WorkLine
from meshwright.torch_internals.tensors import storage_id, without_function

_SKIPPED = (
    "meshwright/torch_internals/simulation.py",
    *("/torch/", "contextlib.py", "meshwright/testing/simulated/"),
    *("meshwright/comm/c10d/", "meshwright/comm/collectives.py"),
)
MOST_RUNS = 4096
"""Most runs of bytes of a strided tensor to compare; with more, the whole range counts."""


@dataclass(frozen=True, slots=True)
class OperationPlace:
    """An operation, for reports."""

    what: str
    """The operator, or the label of a collective."""
    line: WorkLine
    where: str
    """File and line of the caller."""

    def __str__(self) -> str:
        return f"{self.what} on {self.line} at {self.where}"


@dataclass(frozen=True, slots=True)
class AccessFault:
    """A misuse of the device's memory or order."""

    kind: str
    """``unordered``, ``early free``, ``no memory``, ``mixed devices``, ``mixed up``."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


Fault = AccessFault
"""The name in `meshwright.testing.simulated`."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a storage that a tensor covers."""

    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor, before: int = 0) -> Extent:
        """Make the extent of ``tensor``, whose storage begins ``before`` bytes into its block."""
        size = tensor.element_size()
        shape, strides = tuple(tensor.shape), tuple(n * size for n in tensor.stride())
        start = before + int(tensor.storage_offset()) * size
        if 0 in shape:
            return cls(start, start, shape, strides, size)
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        return cls(start, start + reach + size, shape, strides, size)

    @classmethod
    def whole(cls, nbytes: int) -> Extent:
        return cls(0, nbytes, (nbytes,), (1,), 1)

    def overlaps(self, other: Extent) -> bool:
        """Check whether a byte belongs to both."""
        if self.start >= other.end or other.start >= self.end:
            return False
        ours, theirs = list(self._runs()), list(other._runs())
        i = j = 0
        while i < len(ours) and j < len(theirs):
            if ours[i][1] <= theirs[j][0]:
                i += 1
            elif theirs[j][1] <= ours[i][0]:
                j += 1
            else:
                return True
        return False

    def covers(self, other: Extent) -> bool:
        """Check whether every byte of ``other`` surely belongs to this extent too."""
        if other.start == other.end or self == other:
            return True
        runs = list(self._runs())
        return len(runs) == 1 and runs[0][0] <= other.start and other.end <= runs[0][1]

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield the contiguous runs of bytes, in order."""
        dims = sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s)
        run = self.itemsize
        outer: list[tuple[int, int]] = []
        for step, count in dims:
            if step <= run and not outer:
                run = max(run, step * (count - 1) + run)
            else:
                outer.append((step, count))
        if self.start == self.end:
            return
        if math.prod(count for _, count in outer) > MOST_RUNS:
            yield self.start, self.end
            return
        starts = [self.start]
        for step, count in reversed(outer):
            starts = [first + k * step for first in starts for k in range(count)]
        for first in sorted(starts):
            yield first, first + run


@dataclass(frozen=True, slots=True)
class _Access:
    stamp: Stamp
    place: OperationPlace
    extent: Extent
    writes: bool


class _StorageBlock:
    """One storage."""

    def __init__(
        self, tensor: torch.Tensor, home: WorkLine, is_host: bool, dropped: Callable[[int], None]
    ) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        self.home = home
        """The stream that it was allocated on, and returns to."""
        self.is_host = is_host
        self.is_pinned = False
        self.nbytes = storage.nbytes()
        """0 if its memory was freed."""
        self.accesses: list[_Access] = []
        self._address = _address(tensor)
        """Its first address; 0 if unknown."""
        self._end = weakref.ref(storage, lambda _: dropped(key))

    def pin(self) -> None:
        self.is_pinned = True

    def place_of(self, address: int) -> int | None:
        """Return the offset of ``address`` in it, if it is inside."""
        place = address - self._address
        return place if self._address and 0 <= place < self.nbytes else None

    def give_back(self) -> int:
        """Mark its memory as freed; returns its size."""
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes

    def renew(self, home: WorkLine, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give it new, unused memory, from ``home``."""
        self.home, self.nbytes, self._address = home, nbytes, storage.data_ptr()
        self.accesses.clear()

    def add(self, access: _Access, is_past: Callable[[_Access], bool]) -> None:
        """Add an access, and drop those that later ones need not be compared with."""
        self.accesses = [earlier for earlier in self.accesses if not is_past(earlier)]
        self.accesses.append(access)


class Memory:
    """All storages of a program on the simulated device and its host."""

    def __init__(self, report: Callable[[AccessFault], None], host: Callable[[], WorkLine]) -> None:
        """``report`` receives faults; ``host`` returns the work line of the calling thread."""
        self._report = report
        self._host = host
        self._blocks: dict[int, _StorageBlock] = {}
        self._parts: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """For storages inside another one: the offset in bytes there."""
        self.allocated = 0
        self.peak = 0
        """Bytes on the device."""

    def block(self, tensor: torch.Tensor, home: WorkLine) -> _StorageBlock:
        """Return the block of ``tensor``; tensors from before the simulation are on the device."""
        key = storage_id(tensor.untyped_storage())
        if key not in self._blocks:
            self.share(tensor)
        return self._blocks.get(key) or self.allocate(tensor, home, is_host=False)

    def allocate(self, tensor: torch.Tensor, home: WorkLine, *, is_host: bool) -> _StorageBlock:
        """Register the storage of ``tensor``, which is new."""
        found = _StorageBlock(tensor, home, is_host, self._drop)
        self._blocks[storage_id(tensor.untyped_storage())] = found
        if not is_host:
            self._count(found.nbytes)
        return found

    def share(self, tensor: torch.Tensor) -> None:
        """Register the storage of ``tensor`` if it is inside the memory of another one."""
        address = _address(tensor)
        for block in list(self._blocks.values()) if address else ():
            place = block.place_of(address)
            if place is not None:
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                self._blocks[key] = block
                self._parts[key] = place, weakref.ref(storage, partial(self._forget, key))
                return

    def is_known(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._blocks

    def is_host(self, tensor: torch.Tensor) -> bool:
        part = next(tensors_in(tensor), None)
        with without_function():  # so that it works for fake tensors too
            found = None if part is None else self._blocks.get(storage_id(part.untyped_storage()))
        return found is not None and found.is_host

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Check whether the device can access ``tensor`` directly: its own memory, or pinned."""
        found = self._blocks.get(storage_id(tensor.untyped_storage()))
        return found is None or found.is_pinned or not found.is_host

    def pin(self, tensor: torch.Tensor) -> None:
        self._blocks[storage_id(tensor.untyped_storage())].pin()

    def access(
        self,
        tensor: torch.Tensor,
        line: WorkLine,
        stamp: Stamp,
        place: OperationPlace,
        *,
        writes: bool,
    ) -> None:
        """Record that the work at ``stamp`` of ``line`` reads or writes ``tensor``."""
        block = self.block(tensor, line)
        before, _ = self._parts.get(storage_id(tensor.untyped_storage()), (0, None))
        extent = Extent.of(tensor, before)
        if extent.start == extent.end:
            return
        if not block.nbytes:
            self._report(AccessFault("no memory", f"{place} uses memory that was given back"))
            return

        def is_past(earlier: _Access) -> bool:
            is_before = line.comes_after(earlier.stamp)
            if not is_before and (writes or earlier.writes) and extent.overlaps(earlier.extent):
                verbs = [("reads", "writes")[flag] for flag in (writes, earlier.writes)]
                text = f"{place} {verbs[0]} what {earlier.place} {verbs[1]}, and waits for nothing"
                self._report(AccessFault("unordered", text))
            return is_before and (writes or not earlier.writes) and extent.covers(earlier.extent)

        block.add(_Access(stamp, place, extent, writes), is_past)

    def free(self, storage: torch.UntypedStorage, where: str) -> None:
        """Free the memory of ``storage``, whose tensors stay."""
        block = self._blocks.get(storage_id(storage))
        if block is not None:
            self._release(block, where)

    def restore(self, storage: torch.UntypedStorage, nbytes: int, home: WorkLine) -> None:
        """Give ``storage`` new memory of stream ``home``."""
        block = self._blocks.get(storage_id(storage))
        if block is None:
            return
        if not block.is_host:
            self._count(nbytes - block.nbytes)
        block.renew(home, storage, nbytes)

    def _forget(self, key: int, _: object) -> None:
        del self._blocks[key], self._parts[key]

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._release(block, "the end of its last tensor")

    def _release(self, block: _StorageBlock, where: str) -> None:
        nbytes = block.give_back()
        if block.is_host or not nbytes:
            return
        self._count(-nbytes)
        # Work queued there next is ordered after everything this thread knows of, too.
        lines = (block.home, self._host())
        for access in block.accesses:
            if not any(line.comes_after(access.stamp) for line in lines):
                text = f"{where} gives memory back to {block.home}, and {access.place} may use it"
                self._report(AccessFault("early free", text))

    def _count(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; 0 if it has no memory of its own."""
    if tensor.untyped_storage().device.type == "meta":  # a wrapper of another tensor
        return 0
    begin = tensor.data_ptr()
    return begin and begin - int(tensor.storage_offset()) * tensor.itemsize


def caller() -> str:
    """Return file and line of the nearest frame outside torch, simulation and communicator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _SKIPPED):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno}"
