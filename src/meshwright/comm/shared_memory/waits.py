"""Waits of ranks in shared memory: spin briefly, sleep on a futex, detect lost ranks.

A rank numbers its steps with the group and writes the number into its own word: its arrival. A step
is over for a rank when every word has reached that number. Only the owner writes a word, and x86
keeps the order of stores, so data written before the arrival is visible after it.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Generator, Sequence

from meshwright.comm.failures.processes import is_stopped, process_start
from meshwright.comm.shared_memory.arena import ArenaLayout, Segment
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)

Steps = Generator[None, None, None]
"""A collective under way: it yields where it waits for other ranks."""

LEFT, FAILED, MISMATCHED = 1, 2, 3
"""States of a rank that no longer takes part: it ended in order, it failed, it saw a mismatch."""

ARRIVAL, DOORBELL, PID, STARTED, CULPRIT, REASON = 0, 16, 32, 33, 34, 64
"""Words in the page of a rank. The culprit is 1 + the world number of the rank that it blames."""
REASON_BYTES = 2048

NAP = 0.05
"""Seconds of one sleep; after each, the peers' processes and the time limit are checked."""


AWAKE = 250e-6
"""Seconds for which a rank gives its core to others between looks before it sleeps. Waking a
process on an idle core takes some 50 microseconds, and ranks are often less apart."""


class Futex:
    """Sleeping until a 32-bit word of shared memory changes."""

    _NUMBER, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 0x7FFFFFFF

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        word, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self._syscall.argtypes = (size, size, size, size, pointer, size, size)
        self._syscall.restype = word

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Sleep while the word at ``address`` has ``value``, for at most ``seconds``."""
        # The kernel compares 32 bits: the low half of a word of ours, which comes first in memory.
        time_limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(self._NUMBER, address, self._WAIT, value & 0xFFFFFFFF, time_limit, 0, 0)

    def wake(self, address: int) -> None:
        self._syscall(self._NUMBER, address, self._WAKE, self._EVERYBODY, None, 0, 0)


class Peers:
    """The processes of the other ranks of a group, by descriptors."""

    def __init__(self, processes: Sequence[tuple[int, int]], ranks: Sequence[int], me: int) -> None:
        """Watch ``processes`` (process id and start time); ``ranks`` are their world numbers."""
        self.processes = tuple(processes)
        self.pids = [pid for pid, _ in processes]
        self.ranks = tuple(ranks)
        self.me = me
        self._looking = threading.Lock()
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._lost: set[int] = set()
        for rank, (pid, started) in enumerate(processes):
            if pid == os.getpid():
                continue
            try:
                # Before its start is compared: the number may go to another process in between.
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._lost.add(rank)
                continue
            self._rank_of[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)
            try:
                if process_start(pid) != started:
                    self._lost.add(rank)
            except OSError:
                self._lost.add(rank)

    def lost(self) -> set[int]:
        """List ranks whose process has ended."""
        if self._looking.acquire(blocking=False):  # a poll object serves one thread at a time
            try:
                for descriptor, _ in self._poll.poll(0):
                    self._lost.add(self._rank_of[descriptor])
            finally:
                self._looking.release()
        return set(self._lost)

    def name(self, rank: int) -> str:
        """Return the name of ``rank`` of the group for messages: its number in the world."""
        stopped = ", stopped by a signal" if is_stopped(self.pids[rank]) else ""
        return f"rank {self.ranks[rank]} (process {self.pids[rank]}{stopped})"

    def close(self) -> None:
        with self._looking:
            for descriptor in self._rank_of:
                os.close(descriptor)
            self._rank_of.clear()
            self._poll = select.poll()


class Meeting:
    """The steps of a group, in which all ranks arrive and wait for each other.

    One thread of a rank at a time. ``break_with`` may come from any thread.
    """

    def __init__(
        self,
        segment: Segment,
        layout: ArenaLayout,
        peers: Peers,
        crowd: int,
        timeout: float,
    ) -> None:
        """``crowd`` is the number of ranks on this host."""
        self.step = 0
        self.peers = peers
        self.timeout = timeout
        """Seconds for which an operation that begins from now on may wait for its peers."""
        self.broken: BaseException | None = None
        self.layout = layout
        self.segment = segment
        self._words = segment.words
        self._fence = threading.Lock()
        self._futex = Futex()
        self._others = [rank for rank in range(layout.size) if rank != peers.me]
        arrival = [layout.rank_word(rank) + ARRIVAL for rank in range(layout.size)]
        self._arrival_of = {arrival[rank]: rank for rank in self._others}
        self._arrivals = tuple(self._arrival_of)
        self._mine = arrival[peers.me]
        self._sleeping = slice(layout.sleeping, layout.sleeping + layout.size)
        self._listening = slice(layout.listening, layout.listening + layout.size)
        self._states = slice(layout.states, layout.states + layout.size)
        self._bells = [layout.rank_word(rank) + DOORBELL for rank in range(layout.size)]
        self._nobody = bytes(8 * layout.size)
        # With more ranks than cores the core is given at once to those that are waited for.
        self._spins = range(60 if crowd <= len(os.sched_getaffinity(0)) else 10)
        """Looks at a word without giving up the core."""
        self._awake = AWAKE
        """Seconds for which this rank gives its core away before it sleeps until a message comes:
        fewer after messages that took longer, as those of stages that compute in between."""

    # ------------------------------------------------------------------ collectives

    def arrive(self) -> None:
        """Take the next step: ranks that see it arrive see this rank's earlier writes."""
        words = self._words
        step = self.step = self.step + 1
        words[self._mine] = step
        # A locked instruction: else x86 may load the sleepers before the arrival is stored.
        self._fence.acquire(False)
        self._fence.release()
        if words[self._sleeping].tobytes() != self._nobody:
            self._futex.wake(self.segment.address + 8 * self._mine)

    def all_arrived(self) -> bool:
        """Check whether a wait would return at once."""
        words, step = self._words, self.step
        return all(words[index] >= step for index in self._arrivals)

    def wait(
        self, until: float | None, limit: float, what: object, awake_for: float | None = None
    ) -> bool:
        """Wait until every rank has arrived at this step; False when ``until`` comes first.

        ``until`` and ``limit`` are times of the monotonic clock. At ``limit``, or when a rank is
        lost, left or failed, an error names it and ``what`` was waited for. ``awake_for`` replaces
        `AWAKE`.
        """
        words, step = self._words, self.step
        for index in self._arrivals:
            if words[index] < step:
                for _ in self._spins:
                    if words[index] >= step:
                        break
                else:
                    if not self._sleep(index, until, limit, what, awake_for):
                        return False
        # Also of ranks that have arrived: one of them alone may have seen a mismatch of sizes.
        if words[self._states].tobytes() != self._nobody:
            self._check_states(self._others, what, messages=False)
        return True

    def _sleep(
        self,
        index: int,
        until: float | None,
        limit: float,
        what: object,
        awake_for: float | None,
    ) -> bool:
        words, step = self._words, self.step
        now = time.monotonic()
        awake_until = now + (AWAKE if awake_for is None else awake_for)
        while now < awake_until:
            os.sched_yield()
            if words[index] >= step:
                return True
            now = time.monotonic()
        own = self.layout.sleeping + self.peers.me
        address = self.segment.address + 8 * index
        try:
            while words[index] < step:
                self.check(what)
                if now >= limit:
                    raise CollectiveTimeoutError(self.describe_missing(what, self.timeout))
                if until is not None and now >= until:
                    return False
                # Without a fence: where this loads too early, the kernel compares the word again,
                # after a fence of its own.
                words[own] = 1
                seen = words[index]
                if seen >= step:
                    break
                bound = limit if until is None else min(limit, until)
                self._futex.wait(address, seen, max(1e-6, min(NAP, bound - now)))
                now = time.monotonic()
        finally:
            words[own] = 0
        return True

    def missing(self) -> list[int]:
        words, step = self._words, self.step
        return [rank for index, rank in self._arrival_of.items() if words[index] < step]

    def describe_missing(self, what: object, seconds: float) -> str:
        missing = self.missing()
        names = ", ".join(self.peers.name(rank) for rank in missing) or "nobody any more"
        there = [self.peers.ranks[r] for r in range(self.layout.size) if r not in missing]
        return (
            f"{what} has not ended after {seconds:.3g} s: missing is {names}; "
            f"arrived: ranks {', '.join(map(str, there))}"
        )

    # ------------------------------------------------------------------ messages

    def doorbell(self) -> int:
        """Return the value of this rank's bell, to be read before looking for messages."""
        return self._words[self._bells[self.peers.me]]

    def ring(self, rank: int, count: int) -> None:
        """Tell ``rank`` that a message has moved; ``count`` must differ from call to call."""
        words = self._words
        index = self._bells[rank]
        # The one word that several ranks write, and one write may cover another. All that counts is
        # that the value differs from the one heard, so it has the writer's number in it.
        words[index] = (count << 10 | self.peers.me) & 0x7FFFFFFF
        self._fence.acquire(False)
        self._fence.release()
        if words[self._listening.start + rank]:
            self._futex.wake(self.segment.address + 8 * index)

    def listen(self, heard: int, seconds: float) -> None:
        """Wait until the bell has rung since it had the value ``heard``."""
        words = self._words
        index = self._bells[self.peers.me]
        for _ in self._spins:
            if words[index] != heard:
                return
        begun = time.monotonic()
        while time.monotonic() < begun + self._awake:
            os.sched_yield()
            if words[index] != heard:
                return
        own = self._listening.start + self.peers.me
        words[own] = 1
        if words[index] == heard:
            self._futex.wait(self.segment.address + 8 * index, heard, min(NAP, seconds))
        words[own] = 0
        is_long = time.monotonic() - begun > AWAKE
        self._awake = max(self._awake / 2, AWAKE / 16) if is_long else AWAKE

    # ------------------------------------------------------------------ failures

    def check(self, what: object, ranks: Sequence[int] | None = None) -> None:
        """Raise when a rank that ``what`` waits for is lost, left or failed."""
        if self.broken is not None:
            raise unusable(self.broken)
        awaited = self.missing() if ranks is None else ranks
        self._check_states(awaited, what, messages=ranks is not None)
        lost = self.peers.lost().intersection(awaited)
        if ranks is None:
            lost &= set(self.missing())
        for rank in sorted(lost):
            raise RankFailedError(
                f"{self.peers.name(rank)} was lost (its process has ended) while "
                f"rank {self.peers.ranks[self.peers.me]} waited for it in {what}",
                self.peers.ranks[rank],
            )

    def state(self, rank: int) -> int:
        """Return the state that ``rank`` of the group has set itself; 0 while it takes part."""
        return self._words[self.layout.states + rank]

    def _check_states(self, ranks: Sequence[int], what: object, *, messages: bool) -> None:
        for rank in ranks:
            state = self._words[self.layout.states + rank]
            has_arrived = self._words[self.layout.rank_word(rank) + ARRIVAL] >= self.step
            if state == 0 or (state == LEFT and not messages and has_arrived):
                continue
            number = self.peers.ranks[rank]
            if state == LEFT:
                text = f"rank {number} has destroyed the group, so it will never reach {what}"
                raise RankFailedError(text, number)
            reason = self._reason(rank)
            if state == MISMATCHED:
                raise CollectiveMismatchError(reason)
            culprit = self._words[self.layout.rank_word(rank) + CULPRIT] - 1
            first = number if culprit < 0 else culprit
            seen = "" if first == number else f" (seen by rank {number})"
            text = f"rank {first} failed first{seen}: {reason}; this rank was in {what}"
            raise RankFailedError(text, first)

    def break_with(self, error: BaseException) -> None:
        """Make the group unusable for this rank, and tell the others why."""
        if self.broken is not None:
            return
        self.broken = error
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, CollectiveMismatchError):
            reason = str(error)
        data = reason.encode()[: REASON_BYTES - 8]
        first = self.layout.rank_word(self.peers.me) + REASON
        self._words[first] = len(data)
        if isinstance(error, RankFailedError):
            self._words[self.layout.rank_word(self.peers.me) + CULPRIT] = error.rank + 1
        self.segment.bytes[8 * first + 8 : 8 * first + 8 + len(data)] = data
        # Last: who sees the state reads the reason and the culprit.
        self.leave(MISMATCHED if isinstance(error, CollectiveMismatchError) else FAILED)

    def end(self, error: BaseException) -> None:
        """Leave; later calls of this rank raise ``error``."""
        self.leave()
        self.broken = error

    def leave(self, state: int = LEFT) -> None:
        """Record that this rank no longer takes part, unless it has done so before."""
        index = self.layout.states + self.peers.me
        if self._words[index] == 0:
            self._words[index] = state
        # Peers in a collective sleep on this rank's arrival, those in a message on their own bells.
        for word in (self._mine, *(self._bells[rank] for rank in self._others)):
            self._futex.wake(self.segment.address + 8 * word)

    def _reason(self, rank: int) -> str:
        first = self.layout.rank_word(rank) + REASON
        length = min(self._words[first], REASON_BYTES)
        return bytes(self.segment.bytes[8 * first + 8 : 8 * first + 8 + length]).decode(
            errors="replace"
        )


def unusable(cause: BaseException) -> CommunicationError:
    """Make the error for all calls after the first error: of the same kind, naming it."""
    text = f"the group is unusable since an earlier error: {cause}"
    error: CommunicationError
    if isinstance(cause, RankFailedError):
        error = RankFailedError(text, cause.rank)
    elif isinstance(cause, CollectiveMismatchError | CollectiveTimeoutError):
        error = type(cause)(text)
    else:
        error = CommunicationError(text)
    error.__cause__ = cause
    return error
