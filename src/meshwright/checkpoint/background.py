"""Saves that go on while the loop trains.

::

    main thread    describe, prepare | stage | train ...      | the next step, save, finish or wait
    thread                                   | write, report  |
    rank 0's                                 | ... commit     |

All ranks copy their tensors to staging memory at one moment between two steps. Then a thread on
each writes its file, syncs it and reports it by a small file beside it. Rank 0's thread waits for
these reports and commits. Threads send nothing: a collective would cross those of the training.
What the ranks have to know of each other, they exchange in the main thread.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright import comm
from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.storage import advice, reason
from meshwright.checkpoint.tensor_file import file_name
from meshwright.checkpoint.together import STORAGE_LIMIT
from meshwright.checkpoint.writing import (
    SaveRequest,
    Writes,
    agree,
    commit,
    discard,
    discarding,
    prepare,
    report_name,
    tensors_of,
    write,
    write_file,
    write_together,
)
from meshwright.comm.failures.membership import end_process
from meshwright.comm.failures.processes import place
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.streams import DeviceEvent, is_host, record
from meshwright.environment import memory_limit
from meshwright.errors import CheckpointError, CheckpointWriteError

_log = logging.getLogger(__name__)

_BLOCK = 64 * 2**20
"""Bytes of a block of staging memory; larger tensors have one each. Torch rounds pinned memory up
to a power of two, so that one block for all could take twice what it holds."""
_LOST_AFTER = 2.0
"""Seconds without a change of the files, after a rank has failed, in which the rest may come."""
_UNDER_WAY, _DONE, _FAILED = b"\0", b"\1", b"\2"
_Staged = tuple[list[Tensor], list[DeviceEvent]]
"""Copies, and the events after which they are complete."""


class _OtherRankError(CheckpointError):
    """Rank 0 cannot commit, as another rank has failed."""


class Staging:
    """Host memory for the tensors of one save, kept from save to save."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.has_warned = False
        """True when the log says that a save did not fit, and went on in the foreground."""

    def copied(self, tensors: Sequence[Tensor], free: Callable[[], float]) -> _Staged:
        """Copy ``tensors``. Raises ``MemoryError`` if that takes more new memory than ``free``."""
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for tensor in tensors:
            if not sizes or sizes[-1] + tensor.nbytes > _BLOCK:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += -(-tensor.nbytes // 64) * 64  # the largest item has 16 bytes
        devices = list(dict.fromkeys(t.device for t in tensors if not is_host(t.device)))
        if [block.nbytes for block in self.blocks] != sizes:
            self._take(sizes, free, pins=bool(devices))
        copies: list[Tensor] = []
        for tensor, (number, at) in zip(tensors, places, strict=True):
            room = self.blocks[number][at : at + tensor.nbytes]
            copies.append(room.view(tensor.dtype).view(tensor.shape))
            # On a device this is queued behind what was, and before what changes the tensor next.
            copies[-1].copy_(tensor.detach(), non_blocking=True)
        return copies, [record(device) for device in devices]

    def _take(self, sizes: Sequence[int], free: Callable[[], float], *, pins: bool) -> None:
        self.blocks.clear()
        needed, left = sum(sizes) / 2**20, free() / 2**20
        if needed > left:
            raise MemoryError(f"needs {needed:,.0f} MiB of host memory, {left:,.0f} MiB are free")
        try:
            for size in sizes:
                block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pins)
                self.blocks.append(block)
        except RuntimeError as error:  # as torch raises it where memory cannot be had
            self.blocks.clear()
            raise MemoryError(reason(error)) from error
        _log.info("saves in the background keep %.1f MiB of host memory", needed)


@functools.cache
def staging() -> Staging:
    """The staging memory of this process."""
    return Staging()


def begin(request: SaveRequest) -> PendingSave:
    """Describe, prepare and stage a save, and leave the rest to a thread; all ranks call this.

    If staging does not fit in the memory of a rank, all ranks save in the foreground.
    """
    # Without the tensors, which the loop may replace meanwhile, and their memory with them.
    pending = PendingSave(replace(request, tensors={}))
    with ExitStack() as held, discarding(request):
        writes, torso, needs = prepare(request, held)

        def free() -> float:
            # The ranks of a host ask at the same time, before any has taken its part.
            here = [each["bytes"] for each in needs if each["host"] == place()]
            return 0.9 * memory_limit()[0] - sum(here) + needs[request.group.rank]["bytes"]

        def stage() -> tuple[_Staged | None, JSON]:
            try:
                return staging().copied([*tensors_of(request, writes)], free), None
            except MemoryError as error:
                return None, str(error)

        staged, rows = agree(request, "stage", stage)
        lacks = [f"rank {n} {json.loads(row)}" for n, row in enumerate(rows) if json.loads(row)]
        if staged is not None and not lacks:
            pending.start(writes, torso, staged, held.pop_all())
            return pending
        if not staging().has_warned and request.group.rank == 0:
            staging().has_warned = True
            _log.warning("saved in the foreground, as a copy does not fit: %s", lacks[0])
        staging().blocks.clear()
        write_together(request, writes, torso)
        pending.end()
    return pending


class PendingSave:
    """A save in the background: `done` asks, `wait` waits. Made by ``save(background=True)``."""

    def __init__(self, request: SaveRequest) -> None:
        self.path = request.target
        """The checkpoint, which gets this name when it is complete."""
        self.staged = 0
        """Bytes of this rank's memory for staging; 0 for a save in the foreground."""
        self._request = request
        self._monitor = PROCESS.monitor
        self._held = ExitStack()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        """Why this rank's thread has failed."""
        self._wrote, self._stops = threading.Event(), threading.Event()
        """Set when this rank's file is written, or has failed; when the ranks have agreed on it."""
        self._asked: Callable[[], bytes] | None = None
        """Reads how far all ranks were at the last step."""
        self._outcome: CheckpointWriteError | None = None
        self._is_over = False

    def done(self) -> bool:
        """Check, without waiting, whether this rank sees that it is complete or has failed."""
        if self._is_over or self._thread is None or self._thread.is_alive():
            return self._is_over
        return self._error is not None or self.path.is_dir()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its path; all ranks must call this.

        Raises ``CheckpointWriteError`` on all ranks, naming rank, file and reason.
        """
        if not self._is_over:
            if self._asked is not None:
                self._asked()
            try:
                agree(self._request, "write", lambda: self._ended(self._wrote.wait))
                agree(self._request, "commit", lambda: self._ended(self._join))
            except CheckpointWriteError as error:
                self._outcome = error
            self.end()
        if self._outcome is not None:
            raise self._outcome.with_traceback(None)
        return self.path

    def look(self) -> None:
        """At the beginning of a step: exchange how far the ranks are. Raises as `wait`.

        What this step sends is read in the next one, so that no rank waits for it.
        """
        if self._asked is not None:
            states, self._asked = self._asked(), None
            if _FAILED in states or set(states) == set(_DONE):
                self.wait()
                return
        state = _FAILED if self._error is not None else _DONE
        if self._thread is not None and self._thread.is_alive():
            state = _UNDER_WAY
        label = f"checkpoint step {self._request.step}: state"
        self._asked = self._request.group.start_equal(state, label)

    def leave(self) -> CheckpointWriteError | None:
        """Wait before this process ends, without the others; returns why it has failed here."""
        self._join()
        self.end()
        if (error := self._error) is None:
            return None
        text = f"checkpoint {self.path} was not saved: {reason(error)}; {advice(error)}"
        return CheckpointWriteError(text)

    def start(self, writes: Writes, torso: Path, staged: _Staged, held: ExitStack) -> None:
        """Write in a thread, which closes ``held`` when the checkpoint is complete."""
        self._held = held
        self.staged = sum(block.nbytes for block in staging().blocks)
        # A daemon: the process waits for it at exit, after it has left its run if that has failed.
        self._thread = threading.Thread(
            target=self._run, args=(writes, torso, staged), name="meshwright-save", daemon=True
        )
        self._thread.start()
        PROCESS.saving = self

    def end(self) -> None:
        """End the thread; on rank 0 remove what is left of a failed save."""
        self._is_over = True
        self._stops.set()
        self._join()
        if PROCESS.saving is self:
            PROCESS.saving = None
        with self._held:
            if self._error is not None and self._request.group.rank == 0:
                discard(self._request)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _ended(self, waits: Callable[[], object]) -> tuple[None, JSON]:
        waits()
        # The rank that has failed raises its own error, when the ranks compare their writes.
        if self._error is not None and (
            waits == self._join or not isinstance(self._error, _OtherRankError)
        ):
            raise self._error
        return None, None

    # ------------------------------------------------------------------ the thread

    def _run(self, writes: Writes, torso: Path, staged: _Staged) -> None:
        request, rank = self._request, self._request.group.rank

        def report(row: JSON) -> None:
            path, data = torso / report_name(rank), json.dumps(row).encode()
            write_file(request.storage, path, data, [])

        try:
            for event in staged[1]:
                event.synchronize()
            own = write(request, writes, torso, staged[0])
            if rank and own:
                report({**own})
            self._wrote.set()
            if writes.draft is not None:
                checksums = {rank: own, **dict(self._reports(writes.draft.file_maps, torso))}
                commit(request, writes.draft, checksums, torso)
                self._held.close()
        except Exception as error:  # it is raised in the main thread
            self._error = error
            if rank:
                # The ranks agree on it at the next step; this is for rank 0, if none comes.
                with suppress(OSError):  # what it takes of a full disk may be what the report needs
                    request.storage.remove_file(torso / file_name(rank))
                with suppress(OSError):
                    report({"failed": reason(error)})
        finally:
            self._wrote.set()

    def _reports(self, files: Collection[str], torso: Path) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield the other ranks that write, each with its checksums, as they are there."""
        ranks = range(1, self._request.group.size)
        missing = {report_name(rank): rank for rank in ranks if file_name(rank) in files}
        pause, before, since = 0.01, dict[str, int](), time.monotonic()
        while missing:
            # A run that has been left without having ended the save has failed, too.
            is_troubled = self._monitor is not None and (
                PROCESS.monitor is not self._monitor or self._monitor.trouble is not None
            )
            with os.scandir(torso) as entries:
                here = {e.name: e.stat().st_size if is_troubled else 0 for e in entries}
            for name in here.keys() & missing.keys():
                with suppress(ValueError):  # it is not complete yet
                    row, rank = json.loads((torso / name).read_bytes()), missing.pop(name)
                    if "failed" in row:
                        raise _OtherRankError(f"rank {rank}: {row['failed']}")
                    self._request.storage.remove_file(torso / name)
                    yield rank, row
            if here != before:
                before, since = here, time.monotonic()
            limit = _LOST_AFTER if is_troubled else STORAGE_LIMIT
            if missing and (self._stops.wait(pause) or time.monotonic() - since > limit):
                names = ", ".join(map(str, sorted(missing.values())))
                raise _OtherRankError(f"rank {names} has not written its file")
            pause = min(1.5 * pause, 0.25)


def finish() -> Path | None:
    """Wait until the save under way is complete, and return its path; None if there is none.

    All ranks must call this. Raises as `PendingSave.wait`.
    """
    return None if PROCESS.saving is None else PROCESS.saving.wait()


def _leave_at_exit() -> None:
    """Wait for the save under way in a process that is in no run."""
    if PROCESS.saving is not None and not comm.is_connected():
        error = PROCESS.saving.leave()
        if error is not None:
            end_process(error)


atexit.register(_leave_at_exit)
