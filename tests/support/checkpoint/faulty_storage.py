"""Storages that fail, stop or take notes, and groups of ranks in the threads of one process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshwright.checkpoint import Storage
from meshwright.errors import CheckpointError

__all__ = ["CountingStorage", "FailingStorage", "Killed", "KilledStorage", "ThreadRank", "on_ranks"]

T = TypeVar("T")


class CountingStorage(Storage):
    """Calls ``before(operation, path, data)`` before every operation that changes the disk."""

    def __init__(self) -> None:
        self.operations = 0
        self.written = 0
        self.paths: dict[int, Path] = {}

    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        self.operations += 1
        self.written += len(data) if operation == "write" else 0

    def make_directory(self, path: Path) -> None:
        self.before("mkdir", path)
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self.before("create", path)
        handle = super().create(path)
        self.paths[handle] = path
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self.before("write", self.paths[handle], bytes(data))
        super().write(handle, data)

    def sync(self, handle: int) -> None:
        self.before("sync", self.paths[handle])
        super().sync(handle)

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory", path)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source, os.fsencode(target))
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self.before("unlink", path)
        super().remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self.before("rmdir", path)
        super().remove_directory(path)


class FailingStorage(CountingStorage):
    """Fails once, at operation number ``at``, or when more than ``quota`` bytes are written."""

    def __init__(
        self, *, at: int | None = None, quota: int | None = None, code: int = errno.EIO
    ) -> None:
        super().__init__()
        self.at, self.quota, self.code = at, quota, code
        self.failed_in = ""

    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        if self.operations == self.at:
            self.at, self.failed_in = None, operation
            raise OSError(self.code, os.strerror(self.code))
        super().before(operation, path, data)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        room = None if self.quota is None else max(self.quota - self.written, 0)
        if room is not None and len(data) > room:
            super().write(handle, data[:room])
            self.failed_in = "write"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(handle, data)


class Killed(BaseException):
    """Stands for the end of the process: nothing reaches the disk after it."""


class KilledStorage(CountingStorage):
    """The process ends at byte ``at_byte`` or before operation ``at_operation``."""

    def __init__(
        self, *, at_byte: int | None = None, at_operation: int | None = None, really: bool = False
    ) -> None:
        super().__init__()
        self.at_byte, self.at_operation, self.really = at_byte, at_operation, really
        self.is_dead = False

    def die(self) -> None:
        if self.really:
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_dead = True
        raise Killed

    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        if self.is_dead or self.operations == self.at_operation:
            self.die()
        super().before(operation, path, data)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        if self.at_byte is not None and self.written + len(data) > self.at_byte:
            super().write(handle, data[: self.at_byte - self.written])
            self.die()
        super().write(handle, data)


@dataclass
class _Exchange:
    """What the ranks of one group share."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)
        self.slots = [b""] * self.size


@dataclass
class ThreadRank:
    """A rank of a group of threads: what a save asks of a communicator."""

    rank: int
    size: int
    exchange: _Exchange
    labels: list[str] = field(default_factory=list)

    def gather_bytes(self, payload: bytes, *, label: str) -> list[bytes]:
        self.labels.append(label)
        self.exchange.slots[self.rank] = payload
        self.exchange.barrier.wait()
        gathered = list(self.exchange.slots)
        self.exchange.barrier.wait()
        return gathered

    def start_equal(self, payload: bytes, label: str) -> Callable[[], bytes]:
        return lambda: b"".join(self.gather_bytes(payload, label=label))


def on_ranks(size: int, body: Callable[[ThreadRank], T]) -> list[T | BaseException]:
    """Run ``body`` on each rank of a group of threads; its result or what it raised."""
    exchange = _Exchange(size)

    def run(rank: int) -> T | BaseException:
        try:
            return body(ThreadRank(rank, size, exchange))
        except CheckpointError as error:
            return error
        except BaseException as error:
            exchange.barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
