"""Reading a checkpoint: nothing is believed before it is verified, nothing outside is opened.

The manifest says which bytes hold which box of which tensor, so any layout reads what any other has
written: only pieces that overlap the wanted boxes are read, one at a time, each verified whole.
Files are opened relative to the checkpoint's own directory, links are refused, and no byte of a
file is ever interpreted except as the elements of a tensor.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from meshwright.checkpoint.checksums import ALGORITHMS, DIGITS, OF_VERSION
from meshwright.checkpoint.document import JSON, MAX_DOCUMENT_BYTES
from meshwright.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Piece,
    TensorRecord,
    UnknownVersionError,
    from_bytes,
)
from meshwright.checkpoint.pieces import ShardedPiece, boxes_of, describe, torch_dtype
from meshwright.comm.streams import is_host
from meshwright.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from meshwright.layout import Box

_CHUNK = 2**20
_OPEN_FILES = 32
"""Files of tensors that a reader keeps open: those of one tensor's pieces are read in turn."""
_ADVICE = "restore it from a copy, or use another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A loaded checkpoint: whole tensors on the CPU, by name."""

    step: int
    metadata: Mapping[str, JSON]
    tensors: Mapping[str, Tensor]


class Reader:
    """An open checkpoint; a context manager.

    Opening reads the manifest and compares the list and the sizes of the files. Each file's header
    and each piece is verified when it is read. Raises ``CheckpointDamagedError`` naming file and
    tensor, ``CheckpointMismatchError`` for another format version, and ``CheckpointError`` where
    the system refuses to read, or a job that keeps its last checkpoints only has removed it.
    """

    directory: Path
    """Where the checkpoint lies."""
    manifest: Manifest
    """What it holds."""

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
        """Close the directory and its files; further reads are refused by the system."""
        while self._files:
            os.close(self._files.popitem()[1])
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    # ------------------------------------------------------------------ tensors

    def read(self, name: str) -> Tensor:
        """Read a whole tensor."""
        return self.read_piece(name, Box.whole(self._record(name).shape))

    def read_piece(self, name: str, box: Box) -> Tensor:
        """Read one box of a tensor, whatever the boxes it was saved in."""
        record = self._record(name)
        for stored in record.pieces:
            if stored.box == box:
                tensor = torch.empty(box.shape, dtype=self._dtype(name, record))
                self._read_stored(name, stored, tensor)
                return tensor
        tensor = torch.empty(box.shape, dtype=self._dtype(name, record))
        self.fill(name, ShardedPiece(global_shape=record.shape, boxes=(box,), tensor=tensor))
        return tensor

    def read_into(self, name: str, target: Tensor | ShardedPiece) -> None:
        """Fill a tensor, or the boxes that it holds, in place. Shape and dtype must be equal.

        When this raises, a part of the target may be overwritten.
        """
        held = describe(name, target)
        self.check_names({name: (held.shape, held.dtype)}, within=None)
        self.fill(name, target)

    def fill(self, name: str, target: Tensor | ShardedPiece) -> None:
        """Fill a tensor as `read_into`, whose shape and dtype were compared before."""
        tensor = (target.tensor if isinstance(target, ShardedPiece) else target).detach()
        if not tensor.numel():
            return
        direct = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        flat = tensor.view(-1) if direct else torch.empty_like(tensor.reshape(-1))
        held: list[tuple[Tensor, Box]] = []
        position = 0
        for box in boxes_of(target):
            held.append((flat[position : position + box.numel].view(box.shape), box))
            position += box.numel
        record = self._record(name)
        for piece in record.pieces:
            self._fill_from(name, piece, held)
        if not direct:
            tensor.copy_(flat.view(tensor.shape))

    def _fill_from(self, name: str, piece: Piece, held: Sequence[tuple[Tensor, Box]]) -> None:
        """Fill what ``held`` has of a stored piece: straight, where that is all of the piece."""
        common: list[tuple[Tensor, Box]] = []
        for view, box in held:
            inner = box if box == piece.box else box.intersect(piece.box)
            if inner is not None:
                common.append((view if inner is box else view[inner.slices(box)], inner))
        if not common:
            return
        view, inner = common[0]
        if inner == piece.box and view.is_contiguous() and is_host(view.device):
            self._read_stored(name, piece, view)
            if not view.is_inference():
                torch.autograd.graph.increment_version(view)
            return
        found = torch.empty(piece.box.shape, dtype=view.dtype)
        self._read_stored(name, piece, found)
        for view, inner in common:
            view.copy_(found[inner.slices(piece.box)])

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
        problems = [
            f"{name!r} is expected but not in the checkpoint"
            for name in sorted(expected)
            if name not in stored
        ]
        problems += [
            f"{name!r} is in the checkpoint but not expected"
            for name in ([] if within is None else sorted(stored))
            if name not in expected and name.startswith(within or "")
        ]
        for name in sorted(expected):
            record, (shape, dtype) = stored.get(name), expected[name]
            if record is not None and (tuple(shape), dtype) != (record.shape, record.dtype):
                problems.append(
                    f"{name!r} is {record.dtype} {record.shape} in the checkpoint,"
                    f" expected {dtype} {tuple(shape)}"
                )
        if problems:
            head = f"the checkpoint {self.directory} belongs to another model or optimizer:"
            raise CheckpointMismatchError("\n  ".join([head, *problems]))

    def damage(self) -> list[str]:
        """Verify every byte of every file; one line for each damaged file or tensor."""
        found = self._listing_problems()
        reads = [partial(self._verify_header, file) for file in self.manifest.file_maps]
        for name, record in self.manifest.tensors.items():
            read = partial(self._verify_stored, name, self._dtype(name, record))
            reads += [partial(read, piece) for piece in record.pieces]
        for read in reads:
            try:
                read()
            except CheckpointDamagedError as error:
                found.append(str(error))
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
        """Make the error for a file that is gone: damage, unless the whole checkpoint is."""
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
            count = self._read_at(MANIFEST_NAME, handle, memoryview(data), 0)
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

    def _open(self, file: str, *, verify: bool = True) -> int:
        """Open a tensor file of the right size and, when ``verify``, with its right header.

        It stays open until others are.
        """
        handle = self._files.get(file)
        if handle is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            handle = self._files[file] = self._open_plain(file)
            size = os.fstat(handle).st_size
            if size != self.manifest.file_maps[file].size:
                os.close(self._files.pop(file))
                raise self._damaged(file, self._size_problem(file, size))
        if verify and file not in self._verified_headers:
            self._check_header(file, handle)
            self._verified_headers.add(file)
        return handle

    def _verify_header(self, file: str) -> None:
        self._check_header(file, self._open(file, verify=False))

    def _check_header(self, file: str, handle: int) -> None:
        """Compare the header with the only one that fits the manifest."""
        expected = self.manifest.file_maps[file].header
        found = bytearray(len(expected))
        self._read_at(file, handle, memoryview(found), 0)
        if found == expected:
            return
        text = "its header is not the one that was written"
        origin = re.search(
            rb'"file":"(rank_\d{5,9}\.safetensors)","step":"(\d{1,16})"', found[:200]
        )
        if origin and origin.groups() != (file.encode(), b"%d" % self.manifest.step):
            text += f" (it is that of {origin[1].decode()} of step {origin[2].decode()})"
        raise self._damaged(file, text)

    def _verify_stored(self, name: str, dtype: torch.dtype, piece: Piece) -> None:
        self._read_stored(name, piece, torch.empty(piece.box.shape, dtype=dtype), verify=False)

    def _read_stored(self, name: str, piece: Piece, target: Tensor, *, verify: bool = True) -> None:
        """Fill ``target``, contiguous and on the host, with one piece, and verify its checksum."""
        handle = self._open(piece.file, verify=verify)
        start, stop = self.manifest.file_maps[piece.file].spans[piece.key]
        data = target.view(-1).view(torch.uint8)
        view = data.numpy().data
        kind = OF_VERSION[self.manifest.version]
        checksum = ALGORITHMS[kind]()
        # In chunks that the processor's cache still holds when they are summed.
        for position in range(0, len(view), _CHUNK):
            chunk = view[position : position + _CHUNK]
            count = self._read_at(piece.file, handle, chunk, start + position)
            if count < len(chunk):
                raise self._damaged(piece.file, f"tensor {name!r} is cut off")
            checksum.update(chunk)
        found = checksum.intdigest()
        if found != piece.checksum:
            form = f"0{DIGITS[kind]}x"
            raise self._damaged(
                piece.file,
                f"tensor {name!r} (bytes {start} to {stop}) has checksum {found:{form}},"
                f" expected {piece.checksum:{form}}",
            )
        if target.dtype == torch.bool and bool((data > 1).any()):
            raise self._damaged(piece.file, f"tensor {name!r} holds bytes that are no booleans")

    def _read_at(self, file: str, handle: int, target: memoryview, position: int) -> int:
        """Fill ``target`` from a position; returns fewer bytes only at the end of the file."""
        done = 0
        try:
            while done < len(target):
                count = os.preadv(handle, [target[done:]], position + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.directory / file} cannot be read: {error.strerror}"
            ) from error
        return done


def load_tensors(
    directory: str | os.PathLike[str], *, names: Sequence[str] | None = None
) -> Checkpoint:
    """Load whole tensors (all, or those named), verifying every byte that is read.

    Raises ``CheckpointDamagedError`` naming file and tensor where anything differs from what was
    saved, ``CheckpointMismatchError`` for names that are not there, ``CheckpointError`` where
    there is no checkpoint or it cannot be read.
    """
    with Reader(directory) as reader:
        wanted = tuple(reader.manifest.tensors) if names is None else tuple(names)
        return Checkpoint(
            step=reader.manifest.step,
            metadata=reader.manifest.metadata,
            tensors={name: reader.read(name) for name in wanted},
        )


def load_into(
    directory: str | os.PathLike[str],
    targets: Mapping[str, Tensor | ShardedPiece],
    *,
    within: str = "",
) -> Checkpoint:
    """Fill tensors, or the boxes that this rank holds, in place, from any layout.

    All names, shapes and dtypes are compared first (``within``: only stored tensors whose names
    begin so must be among the targets): ``CheckpointMismatchError`` lists every difference
    and nothing is overwritten. When damage is found later, some targets are overwritten.
    The returned ``tensors`` are empty.
    """
    with Reader(directory) as reader:
        held = [describe(name, target) for name, target in targets.items()]
        reader.check_names({row.name: (row.shape, row.dtype) for row in held}, within=within)
        for name, target in targets.items():
            reader.fill(name, target)
        manifest = reader.manifest
        return Checkpoint(step=manifest.step, metadata=manifest.metadata, tensors={})


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint whose files are there with their right sizes."""
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
