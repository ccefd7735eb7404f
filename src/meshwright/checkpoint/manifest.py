"""The manifest: the files of all pieces of all tensors, and the checksum of every byte.

In a sound ``Manifest`` the pieces of each tensor cover it exactly once, and files have nothing but
pieces. An unsound one cannot be constructed: a save fails before it writes, a load when it parses.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from meshwright.checkpoint.document import JSON, canonical, check_json, seal, unseal
from meshwright.checkpoint.tensor_file import (
    DIGITS,
    OF_VERSION,
    FileMap,
    file_map,
    is_file_name,
    item_size,
    quoted,
)
from meshwright.layout import Box

MANIFEST_NAME = "manifest.json"
MAX_STEP = 10**15

_FORMAT = "meshwright-checkpoint"
_VERSION = 2
_MAX_NAME = 4096
_MAX_COVER_WORK = 2**25


class UnknownVersionError(ValueError):
    """The manifest has a format version that this code does not read."""


class Piece(NamedTuple):
    """A stored box of a tensor: ``key`` is its name inside ``file``."""

    file: str
    key: str
    box: Box
    checksum: int


class TensorRecord(NamedTuple):
    """A full tensor. One without elements has no pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of one checkpoint. ``file_maps``, the layout of each file, is derived.

    Raises ``ValueError`` when the description is not sound.
    """

    step: int
    tensors: Mapping[str, TensorRecord]
    metadata: Mapping[str, JSON]
    version: int = _VERSION
    """The version of the format, which sets the kind of checksums."""
    file_maps: Mapping[str, FileMap] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step {self.step} is not from 0 to {MAX_STEP}")
        work = 0
        entries: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
        sound: dict[tuple[object, ...], list[Box]] = {}  # the boxes live as long as their ids
        for name, (dtype, shape, pieces) in self.tensors.items():
            form = dtype, shape, *[id(piece.box) for piece in pieces]
            try:
                if form not in sound:
                    sound[form] = [piece.box for piece in pieces]
                    work += _check_form(dtype, shape, sound[form], _MAX_COVER_WORK - work)
                if len(name) > _MAX_NAME or not name.isascii():
                    _check_name(name)
                for file, key, box, _ in pieces:
                    if file not in entries or len(key) > 2 * _MAX_NAME:
                        _check_place(file, key)
                        entries.setdefault(file, [])
                    entries[file].append((key, dtype, box.shape))
            except ValueError as error:
                raise ValueError(f"tensor {name[:200]!r}: {error}") from None
        maps = {name: file_map(name, self.step, entries[name]) for name in sorted(entries)}
        object.__setattr__(self, "file_maps", maps)

    def owner(self, file: str, key: str) -> str:
        """Return the name of the tensor that a key of a file belongs to; KeyError for none."""
        for name, record in self.tensors.items():
            if any(piece.file == file and piece.key == key for piece in record.pieces):
                return name
        raise KeyError(key)


def _check_form(dtype: str, shape: tuple[int, ...], boxes: list[Box], budget: int) -> int:
    """Raise ValueError for an unsound shape or boxes; returns the work done."""
    if math.prod(shape) * item_size(dtype) >= 2**63:
        raise ValueError(f"shape {shape} is too large")
    return covers(shape, boxes, budget)


def _check_name(name: str) -> None:
    if len(name) > _MAX_NAME:
        raise ValueError(f"a name of {len(name)} characters, at most {_MAX_NAME}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the name is not valid Unicode") from None


def _check_place(file: str, key: str) -> None:
    if not is_file_name(file):
        raise ValueError(f"{file[:80]!r} is not the name of a checkpoint file")
    if len(key) > 2 * _MAX_NAME:
        raise ValueError(f"a key of {len(key)} characters")


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
    """Return the bytes of the manifest file; ``checksum`` defaults to each piece's own."""
    kind = OF_VERSION[manifest.version]
    form = f"0{DIGITS[kind]}x"
    files = (
        f'"{name}":{{"bytes":{at.size},"header_crc32":"{zlib.crc32(at.header):08x}"}}'
        for name, at in manifest.file_maps.items()
    )
    tensors: list[str] = []
    for name, (dtype, shape, pieces) in manifest.tensors.items():
        rows = [
            f'{{"file":"{piece.file}","key":{quoted(piece.key)},"offset":'
            f'{_listed(piece.box.offset)},"shape":{_listed(piece.box.shape)},'
            f'"{kind}":"{checksum(piece):{form}}"}}'
            for piece in pieces
        ]
        tensors.append(
            f'{quoted(name)}:{{"dtype":"{dtype}","shape":{_listed(shape)},'
            f'"pieces":[{",".join(rows)}]}}'
        )
    head = f'{{"format":"{_FORMAT}","version":{manifest.version:d},"step":{manifest.step:d}'
    table = f'"files":{{{",".join(files)}}},"tensors":{{{",".join(tensors)}}}'
    metadata = canonical(manifest.metadata).decode("ascii")
    return seal(f'{head},{table},"metadata":{metadata}}}'.encode("ascii"))


@lru_cache(4096)
def _listed(counts: tuple[int, ...]) -> str:
    """Format a shape; a number of another type raises, or gives another text."""
    return f"[{','.join([f'{count:d}' for count in counts])}]"


def from_bytes(data: bytes) -> Manifest:
    """Parse a manifest file. Raises ``ValueError`` unless every bit is as it was written.

    The parsed manifest is written again and must give the same text. So any missing, extra or
    reordered entry, or one of another type, differs or fails to parse.
    """
    body = unseal(data)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise ValueError(f"manifest: 'format' is not {_FORMAT!r}")
    version = body.get("version")
    if type(version) is int and version not in OF_VERSION:
        read = " and ".join(map(str, OF_VERSION))
        raise UnknownVersionError(f"format version {version}; this Meshwright reads {read}")
    try:
        manifest = _read(body)
        expected = to_bytes(manifest)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"manifest: a value of another type: {error}") from None
    if expected != data:
        pairs = enumerate(itertools.zip_longest(expected, data))
        at = next(place for place, (one, other) in pairs if one != other)
        raise ValueError(
            f"manifest: expected {expected[at : at + 60]!r} at byte {at}, found"
            f" {data[at : at + 60]!r}"
        )
    return manifest


def _read(body: dict[str, Any]) -> Manifest:
    """Parse a well-formed manifest; anything else may raise, or give a wrong manifest."""
    _, version, step, _, tensors, metadata = body.values()
    if type(metadata) is not dict:
        raise ValueError("manifest: 'metadata' must be an object")
    check_json(metadata, "metadata")
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
    records: dict[str, TensorRecord] = {}
    for name, row in tensors.items():
        dtype, shape, stored = row.values()
        pieces: list[Piece] = []
        for piece in stored:
            file, key, offset, extent, checksum = piece.values()
            place = tuple(offset), tuple(extent)
            box = boxes.get(place)
            if box is None:
                box = boxes[place] = Box(*place)
            pieces.append(Piece(file, key, box, int(checksum, 16)))
        records[name] = TensorRecord(dtype, tuple(shape), tuple(pieces))
    return Manifest(step=step, tensors=records, metadata=metadata, version=version)
