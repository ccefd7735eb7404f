"""Reading a checkpoint: everything is verified before use, and no file outside is opened.

The manifest maps bytes to boxes of tensors, so any layout can read what any other has written: only
pieces that overlap the wanted boxes are read, each verified in full. Adjacent small pieces are read
in one call, each into its own memory. Files are opened relative to the checkpoint's own directory,
links are rejected, and the bytes of a file are never interpreted except as elements of a tensor.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from operator import itemgetter
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from meshwright.checkpoint.document import JSON, MAX_DOCUMENT_BYTES
from meshwright.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Piece,
    TensorRecord,
    UnknownVersionError,
    from_bytes,
)
from meshwright.checkpoint.pieces import (
    ShardedPiece,
    boxes_of,
    form_of,
    is_plain_host,
    memory_of,
    torch_dtype,
)
from meshwright.checkpoint.tensor_file import DIGITS, OF_VERSION, Bytes, algorithm
from meshwright.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from meshwright.layout import Box

_CHUNK = 2**20
"""Bytes that are read in one call: still in the CPU's cache for the checksum."""
_BUFFERS = 1024
"""Pieces that are read in one call: the limit of the system."""
_OPEN_FILES = 32
"""Tensor files that a reader keeps open: the pieces of one tensor are in several."""
_ADVICE = "restore it from a copy, or use another checkpoint"


_Read = tuple[str, int, int, str, int, Tensor]
"""A stored piece to read: file, start, stop, name of the tensor, checksum, and the contiguous host
tensor to read into."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A loaded checkpoint: full tensors on the CPU, by name."""

    step: int
    metadata: Mapping[str, JSON]
    tensors: Mapping[str, Tensor]


class Reader:
    """An open checkpoint; a context manager.

    Opening reads the manifest and compares the list and the sizes of the files. Each file's header
    and each piece is verified when it is read. Raises ``CheckpointDamagedError`` naming file and
    tensor, ``CheckpointMismatchError`` for another format version, and ``CheckpointError`` if the
    system cannot read it, or a job with ``keep_last`` has removed it.
    """

    directory: Path
    """The folder of the checkpoint."""
    manifest: Manifest
    """The manifest of the checkpoint."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._verified_headers: set[str] = set()
        self._files: dict[str, int] = {}
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._handle = os.open(self.directory, flags)
        except OSError as error:
            raise CheckpointError(
                f"there is no readable checkpoint at {self.directory}: {error.strerror}"
            ) from error
        try:
            self.manifest = self._read_manifest()
            problems = self._listing_problems()
            if problems:
                raise CheckpointDamagedError("\n".join(problems))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory and its files; further reads fail."""
        while self._files:
            os.close(self._files.popitem()[1])
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    # ------------------------------------------------------------------ tensors

    def read(self, name: str) -> Tensor:
        """Read a full tensor."""
        return self.read_all([name])[name]

    def read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read full tensors, each into its own storage."""
        found = {name: self.empty(name) for name in names}
        self._fill(found)
        return found

    def empty(self, name: str) -> Tensor:
        """Allocate an uninitialized tensor for a full one."""
        record = self._record(name)
        return torch.empty(record.shape, dtype=self._dtype(name, record), device="cpu")

    def read_piece(self, name: str, box: Box) -> Tensor:
        """Read one box of a tensor, which may differ from the boxes it was saved in."""
        record = self._record(name)
        tensor = torch.empty(box.shape, dtype=self._dtype(name, record), device="cpu")
        held = ShardedPiece(global_shape=record.shape, boxes=(box,), tensor=tensor)
        self._fill({name: held})
        return tensor

    def read_into(self, name: str, target: Tensor | ShardedPiece) -> None:
        """Fill a tensor, or its boxes, in place. Shape and dtype must be equal.

        When this raises, a part of the target may be overwritten.
        """
        self.read_all_into({name: target}, within=None)

    def read_all_into(
        self, targets: Mapping[str, Tensor | ShardedPiece], *, within: str | None = ""
    ) -> None:
        """Fill tensors as `read_into`, after comparing all of them as in `check_names`."""
        expected = {name: form_of(name, target) for name, target in targets.items()}
        self.check_names(expected, within=within)
        self._fill(targets)

    def _fill(self, targets: Mapping[str, Tensor | ShardedPiece]) -> None:
        """Fill tensors whose shapes and dtypes have been checked.

        Pieces that do not match a target's memory are read into temporary memory: one large piece
        at a time, or a few small ones.
        """
        reads: list[_Read] = []
        copies: list[tuple[Tensor, Tensor]] = []
        beside = 0
        for read, then in self._steps(targets):
            if read is not None:
                reads.append(read)
            if then:
                copies += then
                beside += then[0][1].untyped_storage().nbytes()  # all of it, whatever is taken
            if beside >= _CHUNK:
                self._read(reads, copies)
                beside = 0
        self._read(reads, copies)

    def _steps(
        self, targets: Mapping[str, Tensor | ShardedPiece]
    ) -> Iterator[tuple[_Read | None, Sequence[tuple[Tensor, Tensor]]]]:
        """Yield the reads that fill ``targets``, each with the (target, source) copies after it."""
        for name, target in targets.items():
            pieces = self._record(name).pieces
            if len(pieces) == 1 and isinstance(target, Tensor) and is_plain_host(target):
                yield self._read_of(name, pieces[0], target), ()
                continue
            tensor = (target.tensor if isinstance(target, ShardedPiece) else target).detach()
            if not tensor.numel():
                continue
            direct = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            flat = tensor.view(-1) if direct else torch.empty_like(tensor.reshape(-1))
            held: list[tuple[Tensor, Box]] = []
            position = 0
            for box in boxes_of(target):
                held.append((flat[position : position + box.numel].view(box.shape), box))
                position += box.numel
            for piece in pieces:
                yield from self._step(name, piece, held)
            if not direct:
                yield None, [(tensor, flat.view(tensor.shape))]

    def _step(
        self, name: str, piece: Piece, held: Sequence[tuple[Tensor, Box]]
    ) -> Iterator[tuple[_Read, Sequence[tuple[Tensor, Tensor]]]]:
        """Yield the read of a piece's overlap with ``held``: directly if that is the full piece."""
        common: list[tuple[Tensor, Box]] = []
        for view, box in held:
            inner = box if box == piece.box else box.intersect(piece.box)
            if inner is not None:
                common.append((view if inner is box else view[inner.slices(box)], inner))
        if not common:
            return
        view, inner = common[0]
        if inner == piece.box and is_plain_host(view):
            yield self._read_of(name, piece, view), ()
        else:
            found = torch.empty(piece.box.shape, dtype=view.dtype, device="cpu")
            then = [(view, found[inner.slices(piece.box)]) for view, inner in common]
            yield self._read_of(name, piece, found), then

    def check_names(
        self,
        expected: Mapping[str, tuple[Sequence[int], str]],
        *,
        within: str | None = "",
    ) -> None:
        """Compare names, shapes and dtypes with those that a model or optimizer expects.

        Only stored tensors whose names begin with ``within`` must be expected (none for ``None``).
        Raises ``CheckpointMismatchError`` listing every difference, one a line.
        """
        stored = self.manifest.tensors
        missing = [name for name in expected if name not in stored]
        more = [name for name in stored if name not in expected] if within is not None else ()
        other = [
            name
            for name, (shape, dtype) in expected.items()
            if name in stored and stored[name][:2] != (dtype, tuple(shape))
        ]
        problems = [f"{name!r} is expected but not in the checkpoint" for name in sorted(missing)]
        problems += [
            f"{name!r} is in the checkpoint but not expected"
            for name in sorted(more)
            if name.startswith(within or "")
        ]
        problems += [
            f"{name!r} is {stored[name].dtype} {stored[name].shape} in the checkpoint,"
            f" expected {expected[name][1]} {tuple(expected[name][0])}"
            for name in sorted(other)
        ]
        if problems:
            head = f"the checkpoint {self.directory} belongs to another model or optimizer:"
            raise CheckpointMismatchError("\n  ".join([head, *problems]))

    def damage(self) -> list[str]:
        """Verify every byte of every file; one line for each damaged file or tensor."""
        found = self._listing_problems()
        reads: list[_Read] = []
        waiting = 0
        for name, record in self.manifest.tensors.items():
            dtype = self._dtype(name, record)
            for piece in record.pieces:
                into = torch.empty(piece.box.shape, dtype=dtype, device="cpu")
                reads.append(self._read_of(name, piece, into))
                waiting += into.nbytes
                if waiting >= _CHUNK:
                    found += map(str, self._damages(reads))
                    reads.clear()
                    waiting = 0
        found += map(str, self._damages(reads))
        return list(dict.fromkeys(found))  # each once, in this order

    # ------------------------------------------------------------------ files

    def _record(self, name: str) -> TensorRecord:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointMismatchError(
                f"the checkpoint {self.directory} has no tensor {name!r}"
            ) from None

    def _dtype(self, name: str, record: TensorRecord) -> torch.dtype:
        try:
            return torch_dtype(record.dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: tensor {name!r}: {error}") from None

    def _damaged(self, file: str, text: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{self.directory / file}: {text}; {_ADVICE}")

    def _missing(self, file: str) -> CheckpointError:
        """Make the error for a missing file: damage, unless the checkpoint was removed."""
        try:
            is_there = os.path.samestat(os.fstat(self._handle), self.directory.stat())
        except OSError:
            is_there = False
        if is_there:
            return self._damaged(file, "the file is missing")
        return CheckpointError(
            f"{self.directory} was removed while it was read, as a job does that keeps its last "
            "checkpoints only; read the newest, or a copy"
        )

    def _read_manifest(self) -> Manifest:
        handle = self._open_plain(MANIFEST_NAME)
        try:
            size = os.fstat(handle).st_size
            if size > MAX_DOCUMENT_BYTES:
                raise self._damaged(MANIFEST_NAME, f"{size} bytes, at most {MAX_DOCUMENT_BYTES}")
            data = bytearray(size)
            count = self._read_at(MANIFEST_NAME, handle, [data], 0)
        finally:
            os.close(handle)
        try:
            return from_bytes(bytes(data[:count]))
        except UnknownVersionError as error:
            raise CheckpointMismatchError(f"{self.directory / MANIFEST_NAME}: {error}") from None
        except ValueError as error:
            raise self._damaged(
                MANIFEST_NAME, f"not the manifest that was written: {error}"
            ) from None

    def _listing_problems(self) -> list[str]:
        """Compare the names and sizes of the files with the manifest."""
        expected = self.manifest.file_maps
        try:
            found = set(os.listdir(self._handle))
        except OSError as error:
            raise CheckpointError(f"cannot list {self.directory}: {error.strerror}") from error
        problems: list[str] = []
        for file in sorted(expected.keys() - found):
            error = self._missing(file)
            if not isinstance(error, CheckpointDamagedError):
                raise error
            problems.append(str(error))
        problems += [
            str(self._damaged(ascii(file)[1:-1], "the file does not belong to the checkpoint"))
            for file in sorted(found - expected.keys() - {MANIFEST_NAME})
        ]
        for file in sorted(expected.keys() & found):
            try:
                size = os.stat(file, dir_fd=self._handle, follow_symlinks=False).st_size
            except FileNotFoundError:
                raise self._missing(file) from None
            if size != expected[file].size:
                problems.append(str(self._damaged(file, self._size_problem(file, size))))
        return problems

    def _size_problem(self, file: str, size: int) -> str:
        at = self.manifest.file_maps[file]
        text = f"the file has {size} bytes, expected {at.size}"
        cut = [key for key, (_, stop) in at.spans.items() if stop > size]
        if not cut or size < len(at.header):
            return text
        more = f" and {len(cut) - 1} more after it" if len(cut) > 1 else ""
        return f"{text}: tensor {self.manifest.owner(file, cut[0])!r} is cut off{more}"

    def _open_plain(self, file: str) -> int:
        """Open a regular file of the directory itself: no link of either kind, no device."""
        # O_NONBLOCK: to open a named pipe would wait for somebody who writes to it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            handle = os.open(file, flags, dir_fd=self._handle)
        except FileNotFoundError:
            raise self._missing(file) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._damaged(file, "a symbolic link instead of the file") from None
            raise CheckpointError(
                f"{self.directory / file} cannot be read: {error.strerror}"
            ) from error
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                raise self._damaged(file, "not a regular file")
            if state.st_nlink > 1:
                raise self._damaged(file, "the file has a second name (a hard link) elsewhere")
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _open(self, file: str) -> int:
        """Open a tensor file and check its size, or reuse its handle; limits the open files."""
        handle = self._files.get(file)
        if handle is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            handle = self._files[file] = self._open_plain(file)
            size = os.fstat(handle).st_size
            if size != self.manifest.file_maps[file].size:
                os.close(self._files.pop(file))
                raise self._damaged(file, self._size_problem(file, size))
        return handle

    def _check_header(self, file: str, handle: int) -> None:
        """Compare the header, once, with the one that follows from the manifest."""
        if file in self._verified_headers:
            return
        expected = self.manifest.file_maps[file].header
        found = bytearray(len(expected))
        self._read_at(file, handle, [found], 0)
        if found == expected:
            self._verified_headers.add(file)
            return
        text = "its header is not the one that was written"
        origin = re.search(
            rb'"file":"(rank_\d{5,9}\.safetensors)","step":"(\d{1,16})"', found[:200]
        )
        if origin and origin.groups() != (file.encode(), b"%d" % self.manifest.step):
            text += f" (it is that of {origin[1].decode()} of step {origin[2].decode()})"
        raise self._damaged(file, text)

    # ------------------------------------------------------------------ pieces

    def _read_of(self, name: str, piece: Piece, into: Tensor) -> _Read:
        file, key, _, checksum = piece
        start, stop = self.manifest.file_maps[file].spans[key]
        return file, start, stop, name, checksum, into

    def _read(self, reads: list[_Read], copies: list[tuple[Tensor, Tensor]]) -> None:
        """Run all reads, then all copies, and clear both lists. Raises for the first damage."""
        # Bump versions before reading: damage may be found after some targets are overwritten.
        kept = filterfalse(Tensor.is_inference, map(itemgetter(-1), reads))
        torch.autograd.graph.increment_version(list(kept))
        for error in self._damages(reads):
            raise error
        for target, source in copies:
            target.copy_(source)
        reads.clear()
        copies.clear()

    def _damages(self, reads: list[_Read]) -> Iterator[CheckpointDamagedError]:
        """Run all reads, adjacent ones in one call; yields damage, including that of headers."""
        reads.sort(key=itemgetter(0, 1))
        run: list[_Read] = []
        file, start, end = "", 0, 0
        for read in reads:
            is_next = read[1] == end and read[0] == file and len(run) < _BUFFERS
            if not is_next or read[2] - start > _CHUNK:
                yield from self._damages_of(file, run)
                run = []
                file, start = read[:2]
            run.append(read)
            end = read[2]
        yield from self._damages_of(file, run)

    def _damages_of(self, file: str, run: Sequence[_Read]) -> Iterator[CheckpointDamagedError]:
        """Read adjacent pieces: small ones in one call, a large one in chunks; yields damage."""
        if not run:
            return
        try:
            handle = self._open(file)
        except CheckpointDamagedError as error:
            yield error
            return
        try:
            self._check_header(file, handle)
        except CheckpointDamagedError as error:
            yield error
        kind = OF_VERSION[self.manifest.version]
        begin = algorithm(kind)
        start, stop = run[0][1], run[-1][2]
        memories = [memory_of(read[-1]) for read in run]
        if stop - start <= _CHUNK:
            count = self._read_at(file, handle, memories, start)
            checksums = list(map(begin, memories))
        else:
            count, checksums = 0, [begin(b"")]
            for position in range(0, stop - start, _CHUNK):
                chunk = memoryview(memories[0])[position : position + _CHUNK]
                count += self._read_at(file, handle, [chunk], start + position)
                checksums[0].update(chunk)
        end = start + count
        for (_, start, stop, name, expected, into), checksum in zip(run, checksums, strict=True):
            found = checksum.intdigest()
            if stop > end:
                yield self._damaged(file, f"tensor {name!r} is cut off")
            elif found != expected:
                form = f"0{DIGITS[kind]}x"
                yield self._damaged(
                    file,
                    f"tensor {name!r} (bytes {start} to {stop}) has checksum {found:{form}},"
                    f" expected {expected:{form}}",
                )
            # torch relies on 0 and 1; the checksum would be right for other bytes, too.
            elif into.dtype == torch.bool and bool((into.view(torch.uint8) > 1).any()):
                yield self._damaged(file, f"tensor {name!r} holds bytes that are no booleans")

    def _read_at(self, file: str, handle: int, into: Sequence[Bytes], position: int) -> int:
        """Fill ``into`` from a position; returns fewer bytes only at the end of the file."""
        done = 0
        try:
            while into and (count := os.preadv(handle, into, position + done)):
                done += count
                into = _after(into, count)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory / file} cannot be read: {error.strerror}"
            ) from error
        return done


def _after(parts: Sequence[Bytes], count: int) -> list[memoryview]:
    """Views of ``parts`` without the first ``count`` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *map(memoryview, parts[number + 1 :])]
        count -= len(part)
    return []


def load_tensors(
    directory: str | os.PathLike[str], *, names: Sequence[str] | None = None
) -> Checkpoint:
    """Load full tensors (all, or those named), verifying every byte that is read.

    Raises ``CheckpointDamagedError`` naming file and tensor if anything differs from what was
    saved, ``CheckpointMismatchError`` for missing names, ``CheckpointError`` if there is no
    checkpoint or it cannot be read.
    """
    with Reader(directory) as reader:
        wanted = tuple(reader.manifest.tensors) if names is None else tuple(names)
        return Checkpoint(
            step=reader.manifest.step,
            metadata=reader.manifest.metadata,
            tensors=reader.read_all(wanted),
        )


def load_into(
    directory: str | os.PathLike[str],
    targets: Mapping[str, Tensor | ShardedPiece],
    *,
    within: str = "",
) -> Checkpoint:
    """Fill tensors, or this rank's boxes, in place, from any layout.

    All names, shapes and dtypes are compared first (``within``: only stored tensors whose names
    begin with it must be among the targets): ``CheckpointMismatchError`` lists every difference,
    and nothing is overwritten. If damage is found later, some targets may be overwritten. The
    returned ``tensors`` are empty.
    """
    with Reader(directory) as reader:
        reader.read_all_into(targets, within=within)
        manifest = reader.manifest
        return Checkpoint(step=manifest.step, metadata=manifest.metadata, tensors={})


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint; the list and sizes of its files are checked."""
    with Reader(directory) as reader:
        return reader.manifest


def verify(directory: str | os.PathLike[str]) -> Manifest:
    """Verify every byte of a checkpoint and return its manifest.

    Raises ``CheckpointDamagedError`` with one line for each damaged file or tensor.
    """
    with Reader(directory) as reader:
        problems = reader.damage()
        if problems:
            raise CheckpointDamagedError("\n".join(problems))
        return reader.manifest
