"""The claim of one job to a folder of checkpoints: two locks, released when the process ends.

::

    the folder itself   from the first save until the process ends     seen on this host
    the file .claim     during a save; of a rank that has joined a     seen on every host that the
                        run, from its first save until it leaves       folder is shared with

Both are flock locks, which belong to an open file. A POSIX lock would be dropped when any other
descriptor of the file is closed, for example by copying the folder in the same process. However the
process ends, the kernel releases its locks; a file server does so when it gives up a lost host. A
forked child shares open files, so a data loader's worker would keep the claim of a killed rank:
children close them first of all, and new programs inherit none.

Processes that the holder has started may save to the folder too, unless it has joined a run.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import operator
import os
import shlex
import socket
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.comm.failures.processes import is_alive, place, status_of
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import CheckpointClaimedError

CLAIM_NAME = ".claim"
GRACE = 0.1
"""Seconds for which a lock that another process holds is retried."""
ENDING = 30.0
"""Seconds within which a killed process must have released its locks."""
FOLDERS = 64
"""Folders that a process without a run keeps claimed; beyond that, the oldest are released."""

_PENDING_KILL = 1 << 8
_EXITING = 4
_PARENT, _FLAGS, _START = 1, 6, 19
"""Fields of /proc/PID/stat after the name."""
_TEXT = 160
_RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a claim, from its own record or from the host's data."""

    pid: int
    host: str = ""
    place: str = ""
    """Host, boot and process-id namespace, within which ``pid`` is unique."""
    started: int = 0
    """Start time in clock ticks after boot, to distinguish a later process of that number."""
    since: str = ""
    run: str = ""
    command: str = ""

    @classmethod
    def of_process(cls, pid: int) -> Holder:
        """Describe the process ``pid`` of this host."""
        fields = status_of(pid)
        started = int(fields[_START]) if fields else 0
        begun = time.localtime(_boot_time() + started / os.sysconf("SC_CLK_TCK"))
        environment = dict(
            entry.split("=", 1) for entry in _proc_list(pid, "environ") if "=" in entry
        )
        return cls(
            pid=pid,
            host=socket.gethostname(),
            place=place(),
            started=started,
            since=time.strftime("%Y-%m-%d %H:%M:%S", begun) if started else "",
            run=environment.get("TORCHELASTIC_RUN_ID", environment.get("SLURM_JOB_ID", ""))[:_TEXT],
            command=" ".join(shlex.join(_proc_list(pid, "cmdline")).split())[:_TEXT],
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder | None:
        """Parse a holder's record; None for anything else."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        run = f" of run {self.run}" if self.run else ""
        since = f", running since {self.since}" if self.since else ""
        command = f" ({self.command})" if self.command else ""
        return f"process {self.pid}{run} on host {self.host}{since}{command}"

    def is_same(self, other: Holder) -> bool:
        return (self.pid, self.started, self.place) == (other.pid, other.started, other.place)

    @property
    def is_here(self) -> bool:
        """True when ``pid`` is valid on this host."""
        return self.place == place()

    @property
    def is_ending(self) -> bool:
        """True when it was killed or has ended on this host: its locks will be released."""
        if not self.is_here:
            return False
        fields = status_of(self.pid)
        if not fields or not is_alive(self.pid, self.started):
            return True
        # A killed process keeps its locks until the kernel has taken its memory apart.
        return bool(int(fields[_FLAGS]) & _EXITING or _pending_signals(self.pid) & _PENDING_KILL)

    @property
    def has_started_this(self) -> bool:
        """True when it is this process or an ancestor of it."""
        pid = os.getpid() if self.is_here else 0
        while pid not in (0, self.pid):
            fields = status_of(pid)
            pid = int(fields[_PARENT]) if fields else 0
        return pid > 0


_UNKNOWN = Holder(pid=0)


class Claim:
    """The claim of this process to one folder, with the locks that the module describes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stays = False
        """True when the file's lock is kept after a save."""
        self.is_saving = False
        self._home = -1
        self._file = -1

    def take(self, *, stays: bool) -> Holder | None:
        """Take the missing locks; returns None, or the process that holds one.

        Once called with ``stays``, the file's lock is kept after every save.
        """
        self.stays = self.stays or stays
        if self._home >= 0 and not _is_at(self._home, self.folder):
            self.close()  # the folder was removed and recreated
        path = self.folder / CLAIM_NAME
        if self._file >= 0 and not _is_at(self._file, path):
            self._file = _closed(self._file)  # the file was removed to free the folder
        had_home = self._home >= 0
        other = None if had_home else self._take_home()
        if other is None and self._file < 0:
            other = self._take_file(path)
        if other is not None and not had_home:
            self._home = _closed(self._home)  # leave it to the holder of the file
        return other

    @contextlib.contextmanager
    def saving(self) -> Generator[None, None, None]:
        """The context of a save, of which one may run; at its end, release the file unless kept.

        Raises ``CheckpointClaimedError`` if another save is running.
        """
        with PROCESS.holding:
            if self.is_saving:
                raise CheckpointClaimedError(
                    f"{self.folder} is being saved to by another thread of this process: save one "
                    "checkpoint after the other, call checkpoint.finish first, or choose another "
                    "folder"
                )
            self.is_saving = True
        try:
            yield
        finally:
            with PROCESS.holding:
                self.is_saving = False
                if not self.stays:
                    self.let_go()

    def let_go(self) -> None:
        """Remove the file and release its lock."""
        if self._file >= 0:
            path = self.folder / CLAIM_NAME
            if _is_at(self._file, path):
                with contextlib.suppress(OSError):  # the lock counts; the file may stay
                    path.unlink()
            self._file = _closed(self._file)

    def release(self) -> None:
        """Release both locks."""
        self.let_go()
        self.close()

    def close(self) -> None:
        """Close the files without removing any, as a forked child must with its copies."""
        self._home, self._file = _closed(self._home), _closed(self._file)

    def _take_home(self) -> Holder | None:
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder_of_lock(os.fstat(handle))
            os.close(handle)
            return None if holder.has_started_this else holder
        except OSError:  # this file system cannot lock directories: rely on the file's lock
            os.close(handle)
            return None
        self._home = handle
        return None

    def _take_file(self, path: Path) -> Holder | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = Holder.from_bytes(os.pread(handle, _RECORD_BYTES, 0))
            os.close(handle)
            return holder or _UNKNOWN
        except OSError as error:
            os.close(handle)
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not _is_at(handle, path):
            os.close(handle)  # its last holder has removed it in between
            return _UNKNOWN
        self._file = handle
        with contextlib.suppress(OSError):  # on a full disk the claim is valid without a record
            self._sign(handle)
        return None

    def _sign(self, handle: int) -> None:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(Holder.of_process(os.getpid()))).encode(), 0)
        if os.fstat(handle).st_uid == os.geteuid():  # all who may write to the folder may claim
            os.fchmod(handle, self.folder.stat().st_mode & 0o666)
        if self.stays:
            os.fsync(handle)  # so that other hosts can read it


def hold(folder: Path, *, stays: bool) -> Claim:
    """Claim an existing ``folder`` for this process, or renew the claim.

    If it ``stays``, all hosts see the claim until `release`, or until the process leaves its run or
    ends; otherwise until the end of the save. Raises ``CheckpointClaimedError`` naming the holder,
    and ``OSError`` if the file system has no locks.
    """
    begun = came = time.monotonic()
    seen: Holder | None = None
    while True:
        with PROCESS.holding:
            claim = PROCESS.held.setdefault(os.path.realpath(folder), Claim(folder))
            holder = claim.take(stays=stays)
            if holder is None:
                _let_go_of_the_first()
                return claim
        now = time.monotonic()
        if seen is None or not holder.is_same(seen):
            # A lock that is released during the lookup has no holder: restart the wait.
            seen, came = holder, now
        if now - came > (ENDING if holder.is_ending else GRACE) or now - begun > 2 * ENDING:
            release(folder)
            raise CheckpointClaimedError(_refusal(folder, holder))
        time.sleep(0.01)


def is_claimed(folder: Path) -> bool:
    """Whether a process of this host saves to ``folder``, or another one has claimed it."""
    own = PROCESS.held.get(os.path.realpath(folder))
    if own is not None and own.is_saving:
        return True
    for path in (folder, folder / CLAIM_NAME):
        with contextlib.suppress(FileNotFoundError):
            if _holder_of_lock(path.stat()).pid not in (0, os.getpid()):
                return True
    return False


def release(directory: str | os.PathLike[str]) -> None:
    """Release a folder of checkpoints that this process has saved to, for other jobs.

    This happens automatically when the process leaves its run (`meshwright.comm.disconnect`) or
    ends.
    """
    with PROCESS.holding:
        claim = PROCESS.held.pop(os.path.realpath(directory), None)
        if claim is not None:
            claim.release()


def _let_go_of_the_first() -> None:
    idle = [name for name, claim in PROCESS.held.items() if not (claim.stays or claim.is_saving)]
    for name in idle[:-FOLDERS]:
        PROCESS.held.pop(name).release()


def _refusal(folder: Path, holder: Holder) -> str:
    who = str(holder) if holder.pid else "another process"
    text = (
        f"{folder} belongs to {who}: one job at a time saves to a folder; end that one, let it "
        "call meshwright.checkpoint.release, or choose another folder"
    )
    if holder.pid and not holder.is_here:
        text += (
            f" (where {holder.host} is gone, the file server gives its lock back after a while; "
            f"otherwise remove {folder / CLAIM_NAME})"
        )
    return text


# ------------------------------------------------------------------ what the system knows


def _closed(handle: int) -> int:
    if handle >= 0:
        os.close(handle)
    return -1


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _holder_of_lock(state: os.stat_result) -> Holder:
    """Find the process of this host that has locked a file, in the kernel's list of locks."""
    device = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}"
    found: dict[bool, int] = {}
    with contextlib.suppress(OSError), open("/proc/locks", encoding="utf-8") as lines:
        for words in map(str.split, lines):
            # Some file systems report files under another device than their locks.
            at, _, inode = words[5].rpartition(":")
            if words[1] == "FLOCK" and inode == str(state.st_ino):
                found.setdefault(at == device, int(words[4]))
    return Holder.of_process(found[max(found)]) if found else _UNKNOWN


def _proc(name: str) -> str:
    """Read a file below /proc; empty if it does not exist."""
    try:
        return Path("/proc", name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _pending_signals(pid: int) -> int:
    """The signals, as bits, that are pending for a process or its first thread."""
    rows = [line.split() for line in _proc(f"{pid}/status").splitlines()]
    sets = [int(row[1], 16) for row in rows if row and row[0] in ("SigPnd:", "ShdPnd:")]
    return functools.reduce(operator.or_, sets, 0)


def _proc_list(pid: int, name: str) -> list[str]:
    text = _proc(f"{pid}/{name}")
    return text.rstrip("\0").split("\0") if text else []


def _boot_time() -> float:
    uptime = _proc("uptime").split()
    return time.time() - float(uptime[0]) if uptime else 0.0


# ------------------------------------------------------------------ forks and the end


def _forget_in_child() -> None:
    for claim in PROCESS.held.values():
        claim.close()
    PROCESS.held.clear()
    PROCESS.holding.release()


os.register_at_fork(
    before=PROCESS.holding.acquire,
    after_in_parent=PROCESS.holding.release,
    after_in_child=_forget_in_child,
)
atexit.register(PROCESS.release)
