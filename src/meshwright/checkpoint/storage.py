"""The few file operations of a save, in one class, where tests inject faults.

A save is crash-safe only through the order of these calls: files written and synced, their
directory synced, the directory renamed, its parent synced. It writes nothing else but its claim.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.errors import CheckpointClaimedError, CheckpointDamagedError


class Storage:
    """A POSIX file system. Every method raises ``OSError`` when it fails.

    Subclasses in tests count, fail, record or drop operations; a save calls nothing else.
    """

    def make_directory(self, path: Path) -> None:
        """Make one directory, which must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a new file for writing; fails for an existing name, follows no links."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]

    def sync(self, handle: int) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close the file."""
        os.close(handle)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory another name in the same parent."""
        source.rename(target)

    def remove_file(self, path: Path) -> None:
        """Remove one file or link."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove one empty directory."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Count the bytes that this process may still write on the file system of ``path``."""
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize

    def remove_tree(self, path: Path) -> None:
        """Remove a directory of files through the operations above; links are not followed."""
        for entry in sorted(os.listdir(path)):
            child = path / entry
            if child.is_dir() and not child.is_symlink():
                self.remove_tree(child)
            else:
                self.remove_file(child)
        self.remove_directory(path)

    def make_directories(self, path: Path) -> None:
        """Make a directory and its missing parents, each one durable before the next."""
        if path.is_dir():
            return
        if path.parent != path:
            self.make_directories(path.parent)
        try:
            self.make_directory(path)
        except FileExistsError:
            if not path.is_dir():
                text = "a file, where a folder is needed"
                raise NotADirectoryError(errno.ENOTDIR, text, str(path)) from None
        self.sync_directory(path.parent)


# ------------------------------------------------------------------ what fails


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Add ``path`` to an OSError that has no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def reason(error: Exception) -> str:
    """Describe an error in one line, with its file."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | TypeError | CheckpointClaimedError | CheckpointDamagedError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def advice(error: Exception) -> str:
    """Advice for the user on ``error``, which a save has raised."""
    match getattr(error, "errno", None):
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free some space or choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "check its permissions or choose another folder"
        case errno.EMFILE | errno.ENFILE:
            return "allow more open files (ulimit -n)"
        case errno.EEXIST | errno.ENOTDIR:
            return "move it away or choose another folder"
        case errno.ENOLCK | errno.ENOSYS | errno.EOPNOTSUPP:
            return (
                "its file system keeps no locks, by which other jobs are kept out: mount it with "
                "locks (Lustre: -o flock), or choose another folder"
            )
        case errno.ENOENT:
            return "all ranks need a folder that they share and nobody removes"
        case None if isinstance(error, CheckpointClaimedError):
            return "use one folder for each job"
        case None if isinstance(error, CheckpointDamagedError):  # of a file that is imported
            return "restore that file from a copy"
        case None if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return "free memory on that rank: drop what it no longer uses, or run fewer a host"
        case None if isinstance(error, ValueError | TypeError):
            return "correct the arguments of save"
        case None:
            return "the traceback of that rank says where it was raised"
        case _:
            return "check the disk or choose another folder"
