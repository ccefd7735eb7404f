"""The manifest: which pieces of which tensors lie in which file, and the checksum of every byte.

In a sound ``Manifest`` each tensor is covered by its pieces exactly once and each file holds
nothing but pieces. An unsound one cannot be made: a save meets the rule before it writes, a load
when it parses.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from meshwright.checkpoint.checksums import DIGITS, OF_VERSION
from meshwright.checkpoint.document import JSON, Fields, check_json, seal, unseal
from meshwright.checkpoint.tensor_file import Entry, FileMap, file_map, is_file_name, item_size
from meshwright.layout import Box

MANIFEST_NAME = "manifest.json"
MAX_STEP = 10**15

_FORMAT = "meshwright-checkpoint"
_VERSION = 2
_MAX_NAME = 4096
_MAX_COVER_WORK = 2**25


class UnknownVersionError(ValueError):
    """The manifest is sound, but of a version that this code does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stored box of a tensor: ``key`` is its name inside ``file``."""

    file: str
    key: str
    box: Box
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A whole tensor. One without elements has no pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of one checkpoint. ``file_maps`` is derived: where everything lies in each file.

    Raises ``ValueError`` when the description is not sound.
    """

    step: int
    tensors: Mapping[str, TensorRecord]
    metadata: Mapping[str, JSON]
    version: int = _VERSION
    """The format's, from which the kind of checksums follows."""
    file_maps: Mapping[str, FileMap] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step {self.step} is not from 0 to {MAX_STEP}")
        work = 0
        for name, record in self.tensors.items():
            work += _check_tensor(name, record, _MAX_COVER_WORK - work)
        object.__setattr__(self, "file_maps", self._map_files())

    def _map_files(self) -> dict[str, FileMap]:
        entries: defaultdict[str, list[Entry]] = defaultdict(list)
        for record in self.tensors.values():
            for piece in record.pieces:
                entry = Entry(key=piece.key, dtype=record.dtype, shape=piece.box.shape)
                entries[piece.file].append(entry)
        return {name: file_map(name, self.step, entries[name]) for name in sorted(entries)}

    def owner(self, file: str, key: str) -> str:
        """Find the tensor that the key of a file belongs to."""
        for name, record in self.tensors.items():
            if any(piece.file == file and piece.key == key for piece in record.pieces):
                return name
        raise KeyError(key)


def _check_tensor(name: str, record: TensorRecord, budget: int) -> int:
    """Refuse an unsound record; return the work that it took."""
    where = f"tensor {name[:200]!r}"
    if len(name) > _MAX_NAME:
        raise ValueError(f"{where}...: a name of {len(name)} characters, at most {_MAX_NAME}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the name is not valid Unicode") from None
    if math.prod(record.shape) * item_size(record.dtype) >= 2**63:
        raise ValueError(f"{where}: shape {record.shape} is too large")
    for piece in record.pieces:
        if not is_file_name(piece.file):
            raise ValueError(f"{where}: {piece.file[:80]!r} is not the name of a checkpoint file")
        if len(piece.key) > 2 * _MAX_NAME:
            raise ValueError(f"{where}: a key of {len(piece.key)} characters")
    try:
        return covers(record.shape, [piece.box for piece in record.pieces], budget)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def covers(shape: Sequence[int], pieces: Sequence[Box], budget: int = _MAX_COVER_WORK) -> int:
    """Check that boxes cover a tensor of ``shape`` exactly once; return the work done.

    Raises ``ValueError`` for a box outside, an empty box, an overlap, a gap, or when the answer
    takes more than ``budget`` operations.

    A box is given by its corners with alternating signs (the mixed difference of its indicator),
    and that map loses nothing: the boxes tile the tensor exactly if and only if their signed
    corners add up to the tensor's own. This takes ``pieces * 2**dims`` operations, counting only
    dims that are cut; comparing pairs would take ``pieces**2``.
    """
    if [box.shape for box in pieces] == [tuple(shape)] and not any(pieces[0].offset) and all(shape):
        return 1
    whole = Box.whole(shape)
    for box in pieces:
        if len(box.shape) != len(shape) or box.numel == 0 or box.intersect(whole) != box:
            raise ValueError(f"the piece {_show(box)} is empty or outside of shape {tuple(shape)}")
    if sum(box.numel for box in pieces) != whole.numel:
        raise ValueError(_explain(shape, pieces))
    cut = [dim for dim in range(len(shape)) if any(box.shape[dim] != shape[dim] for box in pieces)]
    work = len(pieces) << min(len(cut), 64)
    if work > budget:
        raise ValueError(f"{len(pieces)} pieces cut along {len(cut)} dims are too many to check")
    if not cut:
        return work
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for sign, box in [(-1, whole), *((1, box) for box in pieces)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                box.offset[d] + end * box.shape[d] for d, end in zip(cut, ends, strict=True)
            )
            corners[corner] += -sign if sum(ends) % 2 else sign
    if any(corners.values()):
        raise ValueError(_explain(shape, pieces))
    return work


def _explain(shape: Sequence[int], pieces: Sequence[Box]) -> str:
    for a, b in itertools.islice(itertools.combinations(pieces, 2), 100_000):
        if a.intersect(b) is not None:
            return f"the pieces {_show(a)} and {_show(b)} overlap"
    held = sum(box.numel for box in pieces)
    return f"the pieces leave a gap: they hold {held} of {math.prod(shape)} elements"


def _show(box: Box) -> str:
    return f"[{', '.join(box.ranges())}]"


def to_bytes(
    manifest: Manifest, checksum: Callable[[Piece], int] = attrgetter("checksum")
) -> bytes:
    """Write the manifest file; ``checksum`` says that of each piece, by default its own."""
    kind = OF_VERSION[manifest.version]
    form = f"0{DIGITS[kind]}x"
    files: dict[str, JSON] = {
        name: {"bytes": at.size, "header_crc32": f"{zlib.crc32(at.header):08x}"}
        for name, at in manifest.file_maps.items()
    }
    tensors: dict[str, JSON] = {
        name: {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "pieces": [
                {
                    "file": piece.file,
                    "key": piece.key,
                    "offset": list(piece.box.offset),
                    "shape": list(piece.box.shape),
                    kind: format(checksum(piece), form),
                }
                for piece in record.pieces
            ],
        }
        for name, record in manifest.tensors.items()
    }
    return seal(
        {
            "format": _FORMAT,
            "version": manifest.version,
            "step": manifest.step,
            "files": files,
            "tensors": tensors,
            "metadata": dict(manifest.metadata),
        }
    )


def from_bytes(data: bytes) -> Manifest:
    """Parse a manifest file. Raises ``ValueError`` unless every bit is as it was written."""
    fields = Fields(unseal(data), "manifest")
    if fields.text("format") != _FORMAT:
        raise ValueError(f"manifest: 'format' is not {_FORMAT!r}")
    version = fields.count("version")
    if version not in OF_VERSION:
        read = " and ".join(map(str, OF_VERSION))
        raise UnknownVersionError(f"format version {version}; this Meshwright reads {read}")
    kind = OF_VERSION[version]
    step = fields.count("step")
    files = {name: _file(value, name) for name, value in fields.mapping("files").items()}
    tensors = {
        name: _tensor(value, name, kind) for name, value in fields.mapping("tensors").items()
    }
    metadata = fields.mapping("metadata")
    check_json(metadata, "metadata")
    fields.end()
    manifest = Manifest(step=step, tensors=tensors, metadata=metadata, version=version)
    expected = {name: (at.size, zlib.crc32(at.header)) for name, at in manifest.file_maps.items()}
    if files != expected:
        wrong = sorted(k for k in files.keys() | expected if files.get(k) != expected.get(k))
        raise ValueError(f"manifest: size or header checksum of {wrong[0][:80]!r} contradicts it")
    return manifest


def _file(value: JSON, name: str) -> tuple[int, int]:
    """Read the size of a file in bytes and the checksum of its header."""
    fields = Fields(value, f"file {name[:80]!r}")
    record = fields.count("bytes"), fields.checksum("header_crc32", DIGITS["crc32"])
    fields.end()
    return record


def _tensor(value: JSON, name: str, kind: str) -> TensorRecord:
    where = f"tensor {name[:200]!r}"
    fields = Fields(value, where)
    record = TensorRecord(
        dtype=fields.text("dtype"),
        shape=fields.counts("shape"),
        pieces=tuple(_piece(item, where, kind) for item in fields.items("pieces")),
    )
    fields.end()
    return record


def _piece(value: JSON, where: str, kind: str) -> Piece:
    fields = Fields(value, where)
    piece = Piece(
        file=fields.text("file"),
        key=fields.text("key"),
        box=Box(fields.counts("offset"), fields.counts("shape")),
        checksum=fields.checksum(kind, DIGITS[kind]),
    )
    fields.end()
    return piece
