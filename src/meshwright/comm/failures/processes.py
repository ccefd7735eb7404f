"""Processes as `/proc` shows them: identity, state, and how long one has been idle.

A rank that does not answer may be dead, stopped, or busy in a call that holds the interpreter lock.
Only a process on the same host can find out, by inspecting its process.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")

_SERVERS = ("pt_tcpstore", "pt_gloo", "gloo_tcp")
"""Threads that serve other ranks: they run in a process that is stuck, too."""

_IDLE_SHARE = 0.01
"""Share of a core that threads of a stuck process still use, to poll the interpreter lock."""


class Look(NamedTuple):
    """A snapshot of a process."""

    state: str
    """Linux's letter of the main thread's state: T for stopped, "" for a process that has ended."""
    ticks: int
    """CPU time used so far, without the threads that serve others."""
    is_running: bool
    """True when a thread runs, or would if it were given a core."""

    @classmethod
    def of(cls, values: object) -> Look | None:
        """Read a snapshot from JSON values; None for anything else."""
        match values:
            case [str(state), int(ticks), bool(is_running)]:
                return cls(state, ticks, is_running)
        return None

    @property
    def is_stopped(self) -> bool:
        """True when SIGSTOP or a debugger has stopped the process."""
        return self.state in ("T", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of some host, told apart from a later one with the same id."""

    place: str
    """Host, boot and process-id namespace: equal where process numbers mean the same."""
    pid: int
    started: int
    """In clock ticks since the boot; -1 where the system does not say."""

    @classmethod
    def own(cls) -> Process:
        try:
            started = process_start(os.getpid())
        except OSError:
            started = -1
        return cls(place=place(), pid=os.getpid(), started=started)

    @property
    def is_visible(self) -> bool:
        """True when this process can inspect it."""
        return self.started >= 0 and self.place == place()

    @property
    def has_ended(self) -> bool:
        """True when it is known to have ended."""
        return self.is_visible and not is_alive(self.pid, self.started)

    def look(self) -> Look:
        """Read its state, its CPU time, and whether one of its threads is running."""
        if self.has_ended:
            return Look("", 0, is_running=False)
        ticks, is_running = 0, False
        folder = f"/proc/{self.pid}/task"
        try:
            for thread in os.listdir(folder):
                name, fields = _stat(f"{folder}/{thread}/stat")
                if name.startswith(_SERVERS):
                    continue
                ticks += int(fields[11]) + int(fields[12])
                is_running = is_running or fields[0] == "R"
            state = _stat(f"/proc/{self.pid}/stat")[1][0]
        except OSError:  # a thread or the process has ended meanwhile
            return Look("?", 0, is_running=True)
        return Look(state, ticks, is_running=is_running)


class Stillness:
    """How long a process has been idle, from repeated snapshots."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._ticks = 0

    def take(self, look: Look, now: float) -> float:
        """Add a snapshot at time ``now`` (seconds); returns the seconds of idleness.

        A runnable process without a core is not idle. Less than `_IDLE_SHARE` of a core counts as
        idle.
        """
        if self._since is None:
            self._since, self._ticks = now, look.ticks
            return 0.0
        used = abs(look.ticks - self._ticks) / _TICKS
        is_at_work = look.is_running or used > max(0.02, _IDLE_SHARE * (now - self._since))
        if is_at_work and not look.is_stopped:
            self._since, self._ticks = now, look.ticks
        return now - self._since


def place() -> str:
    """Name the host, its boot and the pid namespace of this process."""
    return f"{socket.gethostname()}{_boot()}"


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"/{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks, to tell it from a later process with its id.

    Raises OSError when there is no such process, or no `/proc`.
    """
    return int(_stat(f"/proc/{pid}/stat")[1][19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with that id and start time exists and is no zombie."""
    fields = status_of(pid)
    return bool(fields) and fields[0] not in ("Z", "X") and int(fields[19]) == started


def is_stopped(pid: int) -> bool:
    """Whether ``pid`` is stopped by SIGSTOP or a debugger."""
    return status_of(pid)[:1] in (["T"], ["t"])


def status_of(pid: int) -> list[str]:
    """List the kernel's fields of process ``pid`` from the state on; empty when it is gone."""
    try:
        return _stat(f"/proc/{pid}/stat")[1]
    except OSError:
        return []


def _stat(path: str) -> tuple[str, list[str]]:
    """Read the name of a process or thread, and the fields after it, from the state on."""
    with open(path, encoding="utf-8", errors="replace") as file:
        head, _, rest = file.read().rpartition(")")
    return head.partition("(")[2], rest.split()
