"""What a disk may hold after a loss of power: all that was synced, and any part of the rest.

A ``RecordedStorage`` notes a save's operations. ``crash`` replays the first of them on a model of a
file system that keeps synced and unsynced state apart, then draws one legal state at random: of a
file, the synced bytes and any blocks written since; of a directory, the synced names and any
changes since.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from support.checkpoint.faulty_storage import CountingStorage

__all__ = ["Operation", "RecordedStorage", "crash", "read_tree"]

BLOCK = 64


@dataclass(frozen=True)
class Operation:
    """One operation on the disk; ``data`` holds bytes written, or the new name."""

    kind: str
    path: Path
    data: bytes = b""


class RecordedStorage(CountingStorage):
    """Works as a disk and notes what it did; kinds in ``dropped`` are not done, as if forgotten."""

    def __init__(self, dropped: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.dropped = dropped
        self.record: list[Operation] = []

    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        super().before(operation, path, data)
        if operation not in self.dropped:
            self.record.append(Operation(operation, path, data))


@dataclass
class File:
    """A file: what is written, and what of it is on the disk for certain."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    """A directory: the names on the disk, and the changes since, each atomic."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def now(self) -> dict[str, File | Folder]:
        return apply(self.names, self.changes)


def apply(
    names: dict[str, File | Folder], changes: list[dict[str, File | Folder | None]]
) -> dict[str, File | Folder]:
    found: dict[str, File | Folder | None] = dict(names)
    for change in changes:
        found.update(change)
    return {name: node for name, node in found.items() if node is not None}


def read_tree(path: Path) -> Folder:
    """A directory whose content is wholly on the disk."""
    names: dict[str, File | Folder] = {}
    for child in path.iterdir():
        if child.is_dir():
            names[child.name] = read_tree(child)
        else:
            data = child.read_bytes()
            names[child.name] = File(bytearray(data), data)
    return Folder(names)


class _Disk:
    def __init__(self, root: Folder, at: Path) -> None:
        self.root, self.at = root, at

    def find(self, path: Path) -> File | Folder:
        node: File | Folder = self.root
        for part in path.relative_to(self.at).parts:
            assert isinstance(node, Folder)
            node = node.now()[part]
        return node

    def folder(self, path: Path) -> Folder:
        node = self.find(path)
        assert isinstance(node, Folder)
        return node

    def file(self, path: Path) -> File:
        node = self.find(path)
        assert isinstance(node, File)
        return node

    def do(self, operation: Operation) -> None:
        path = operation.path
        match operation.kind:
            case "mkdir":
                self.folder(path.parent).changes.append({path.name: Folder()})
            case "create":
                self.folder(path.parent).changes.append({path.name: File()})
            case "write":
                self.file(path).data += operation.data
            case "sync":
                file = self.file(path)
                file.synced = bytes(file.data)
            case "sync_directory":
                folder = self.folder(path)
                folder.names, folder.changes = folder.now(), []
            case "rename":
                target = Path(operation.data.decode())
                change = {path.name: None, target.name: self.find(path)}
                self.folder(path.parent).changes.append(change)
            case "unlink" | "rmdir":
                self.folder(path.parent).changes.append({path.name: None})
            case _:
                raise AssertionError(operation)


def _settle(node: Folder, into: Path, choose: random.Random) -> None:
    """Write one legal state: a random choice of everything that was not synced."""
    into.mkdir()
    kept = [change for change in node.changes if choose.random() < 0.5]
    for name, child in apply(node.names, kept).items():
        if isinstance(child, Folder):
            _settle(child, into / name, choose)
            continue
        size = choose.choice([len(child.synced), len(child.data)])
        data = bytearray(child.synced[:size].ljust(size, b"\0"))
        for start in range(0, size, BLOCK):
            if choose.random() < 0.5:
                data[start : start + BLOCK] = child.data[start : min(start + BLOCK, size)]
        (into / name).write_bytes(data)


def crash(
    before: Folder, at: Path, record: list[Operation], into: Path, choose: random.Random
) -> None:
    """Do ``record`` on the tree ``before`` of the directory ``at``, lose power, settle ``into``."""
    disk = _Disk(before, at)
    for operation in record:
        disk.do(operation)
    _settle(disk.root, into, choose)
