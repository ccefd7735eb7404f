"""Memory that several processes of one host map: memfd segments, tensors in them, a group's arena.

A segment is an anonymous file (``memfd_create``): it has no name in any directory and no quota of
``/dev/shm``, and it is gone when the last process that maps it has ended, in whatever way. Another
process opens it as ``/proc/<pid>/fd/<number>``, which the kernel allows to the same user only (and
to root), within one pid namespace.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import math
import mmap
import os
import platform
import resource
import sys
import threading
import weakref
from dataclasses import dataclass

import torch

from meshwright.comm.failures.processes import place
from meshwright.errors import CommunicationError

PAGE = 4096
MAGIC = 0x6D657368_77726967
POOL_BYTES = 256 << 20
"""Freed tensors are kept for the next allocation of their size up to this many bytes."""
LINE = 16
"""Words of 8 bytes that one busy word occupies: two cache lines, as x86 fetches them in pairs."""


def unsupported() -> str:
    """Explain why collectives cannot use shared memory on this machine, or return ""."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "shared memory needs Linux with memfd_create"
    if platform.machine() not in ("x86_64", "AMD64") or sys.byteorder != "little":
        return (
            f"shared memory relies on the store order of x86-64, and this is {platform.machine()}"
        )
    if not hasattr(os, "pidfd_open"):
        return "this Python has no os.pidfd_open, by which a lost rank is noticed"
    try:
        probe = os.memfd_create("meshwright-probe", os.MFD_CLOEXEC)
        try:
            os.close(os.open(f"/proc/self/fd/{probe}", os.O_RDWR | os.O_CLOEXEC))
            os.close(os.pidfd_open(os.getpid()))
            # Without the boot's id, hosts of one name would be taken for one host.
            os.close(os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(probe)
    except OSError as error:
        return f"memfd, pidfd or /proc is not usable here ({error})"
    return "" if _is_dumpable() else "this process is not dumpable, so its peers cannot map memory"


def host_identity() -> str:
    """Return a text that is equal in two processes exactly when they can share memory."""
    return f"{place()}/{os.geteuid()}"


def _is_dumpable() -> bool:
    get_dumpable = 3
    return ctypes.CDLL(None).prctl(get_dumpable, 0, 0, 0, 0) == 1


@dataclass(frozen=True, slots=True)
class Location:
    """The location of bytes in a segment of a process, by which a peer maps them."""

    serial: int
    descriptor: int
    offset: int
    nbytes: int
    """Size of the whole segment."""


class Segment:
    """One memfd, mapped. Readable and writable by this user only, and never shrunk."""

    def __init__(self, descriptor: int, nbytes: int, *, populate: bool = False) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.map = mmap.mmap(descriptor, nbytes, flags=flags)
        self.bytes = memoryview(self.map)
        self.words = self.bytes.cast("q")
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, name: str, nbytes: int, *, populate: bool = False) -> Segment:
        """Make a segment of ``nbytes``, in whole pages, which are used when first touched."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            nbytes = -(-nbytes // PAGE) * PAGE
            os.ftruncate(descriptor, nbytes)
            # A peer that touches pages beyond the end of a file ends by SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return cls(descriptor, nbytes, populate=populate)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, pid: int, descriptor: int, nbytes: int, *, populate: bool = False) -> Segment:
        """Map the segment that process ``pid`` holds as ``descriptor``."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CommunicationError(
                f"the shared memory of process {pid} cannot be opened ({error}): has it ended, or "
                "does it run as another user or in another process-id namespace? "
                "Use the gloo backend between such processes"
            ) from error
        try:
            found = os.fstat(own)
            if found.st_uid != os.geteuid() or found.st_size != nbytes:
                raise CommunicationError(
                    f"{path} is not the segment of {nbytes} bytes of this user that was announced: "
                    f"it has {found.st_size} bytes and belongs to user {found.st_uid}"
                )
            segment = cls(own, nbytes, populate=populate)
        except BaseException:
            os.close(own)
            raise
        segment.close_descriptor()  # peers open the owner's; the mapping needs none
        return segment

    def close_descriptor(self) -> None:
        """Close the file that peers open; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedTensors:
    """The tensors of this process that peers may read and write in place, and those of peers.

    Each tensor has its own segment: a page with its serial number, then its elements. The segment
    returns to a pool when the tensor's storage is freed. A peer gets its location from a
    collective's record, and keeps it mapped until its owner has closed it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a tensor may be freed by the collector at any point
        self._serial = 0
        self._starts: list[int] = []
        self._owned: dict[int, Segment] = {}
        self._pool: dict[int, list[Segment]] = {}
        self._pooled = 0
        self._mapped: dict[tuple[int, int], Segment] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make an uninitialized 1-D tensor in shared memory.

        It is an ordinary tensor if it has no elements, or when segments use half of the file
        descriptors that this process may open.
        """
        segment = self._take(PAGE + numel * dtype.itemsize) if numel else None
        if segment is None:
            return torch.empty(numel, dtype=dtype, device="cpu")
        start = segment.address + PAGE
        with self._lock:
            bisect.insort(self._starts, start)
            self._owned[start] = segment
        memory = (ctypes.c_char * (numel * dtype.itemsize)).from_buffer(segment.map, PAGE)
        freed = weakref.finalize(memory, self._freed, start, os.getpid())
        # At exit the tensor may still be in use: its segment has to stay.
        freed.atexit = False  # pyrefly: ignore[missing-attribute]
        return torch.frombuffer(memory, dtype=dtype)

    def locate(self, address: int) -> Location | None:
        """Return the location of ``address`` in the segments of this process, if it is in one."""
        starts = self._starts
        if not starts or address < starts[0]:
            return None
        with self._lock:
            index = bisect.bisect_right(starts, address) - 1
            segment = self._owned[starts[index]] if index >= 0 else None
        if segment is None or address >= segment.address + segment.nbytes:
            return None
        return Location(
            segment.words[1], segment.descriptor, address - segment.address, segment.nbytes
        )

    def address_of(self, pid: int, location: Location) -> int:
        """Return the local address of bytes in a segment of ``pid``, mapping it if necessary."""
        if pid == self._pid:  # a peer that is a thread of this process
            with self._lock:
                owned = list(self._owned.values())
            start = next(s for s in owned if s.words[1] == location.serial)
            return start.address + location.offset
        with self._lock:
            segment = self._mapped.get((pid, location.serial))
            if segment is None:
                segment = self._map(pid, location)
            return segment.address + location.offset

    def _map(self, pid: int, location: Location) -> Segment:
        # Only here, since nothing tells this process that a peer has freed a tensor.
        for key in [key for key, mapped in self._mapped.items() if not mapped.words[2]]:
            del self._mapped[key]
        segment = Segment.open(pid, location.descriptor, location.nbytes, populate=True)
        if segment.words[0] != MAGIC or segment.words[1] != location.serial:
            raise CommunicationError(
                f"process {pid} announced segment {location.serial} under descriptor "
                f"{location.descriptor}, which holds another one"
            )
        self._mapped[(pid, location.serial)] = segment
        return segment

    def _take(self, nbytes: int) -> Segment | None:
        """Take a segment from the pool, or make one; None when there are too many."""
        size = _rounded(nbytes)
        with self._lock:
            free = self._pool.get(size)
            if free:
                self._pooled -= size
                return free.pop()
            count = len(self._owned) + sum(map(len, self._pool.values()))
            if 2 * (count + 1) > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                return None
            self._serial += 1
            serial = self._serial
        segment = Segment.create("meshwright-tensor", size, populate=True)
        segment.words[1] = serial
        segment.words[2] = 1
        segment.words[0] = MAGIC
        return segment

    def _freed(self, start: int, pid: int) -> None:
        """Return the segment of a freed tensor to the pool, unless this is a forked child."""
        if pid != os.getpid():
            return
        with self._lock:
            del self._starts[bisect.bisect_left(self._starts, start)]
            segment = self._owned.pop(start)
            if self._pooled + segment.nbytes <= POOL_BYTES:
                self._pooled += segment.nbytes
                self._pool.setdefault(segment.nbytes, []).append(segment)
                return
        # The pages go at once, but for the first: there peers read that they can drop their
        # mapping, when they next map another segment.
        segment.words[2] = 0
        segment.map.madvise(mmap.MADV_REMOVE, PAGE, segment.nbytes - PAGE)
        segment.close_descriptor()


def _rounded(nbytes: int) -> int:
    """Round up in steps of an eighth of a power of two, so that the pool finds equal sizes."""
    step = max(PAGE, 1 << max(0, math.ceil(math.log2(nbytes)) - 3))
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets in the arena of a group of ``size`` ranks.

    ::

        words of the group    who sleeps (per rank), state (per rank)
        page per rank         arrival, doorbell, pid, start time, reason of failure
        records               per rank 2, for even and odd steps: what it called, where its data is
        slots                 per rank 2, for even and odd steps: staged data
        channels              per ordered pair of ranks: point-to-point messages

    Untouched pages take no memory, so slots and channels cost only what is used of them.
    """

    size: int
    slot_bytes: int
    channel_bytes: int

    @property
    def sleeping(self) -> int:
        """First word of the array "rank sleeps in a collective"."""
        return LINE

    @property
    def listening(self) -> int:
        """First word of the array "rank sleeps for a message"."""
        return self.sleeping + -(-self.size // LINE) * LINE

    @property
    def states(self) -> int:
        """First word of the array of states: 0 takes part, otherwise see `waits`."""
        return self.listening + -(-self.size // LINE) * LINE

    @property
    def _pages(self) -> int:
        return -(-(self.states + self.size) * 8 // PAGE) * PAGE

    def rank_word(self, rank: int) -> int:
        """First word of the page of ``rank``."""
        return (self._pages + rank * PAGE) // 8

    @property
    def record_words(self) -> int:
        """Length of a record: 64 words of call and text, then a note for each rank."""
        return 64 + -(-self.size // 8) * 8

    def record(self, rank: int, parity: int) -> int:
        """First word of the record of ``rank`` for steps of ``parity``."""
        first = (self._pages + self.size * PAGE) // 8
        return first + (2 * rank + parity) * self.record_words

    def slot(self, rank: int, parity: int) -> int:
        """First byte of the slot of ``rank`` for steps of ``parity``."""
        first = -(-self.record(self.size, 0) * 8 // PAGE) * PAGE
        return first + (2 * rank + parity) * self.slot_bytes

    def channel(self, source: int, target: int) -> int:
        """First byte of the channel from rank ``source`` to rank ``target``."""
        return self.slot(self.size, 0) + (source * self.size + target) * self.channel_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole arena: an upper bound of the group's memory."""
        return self.channel(self.size, 0)
