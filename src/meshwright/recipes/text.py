"""Text as bytes: which files are read, which are held out, and windows of them by global index.

Nothing is decoded: a byte is a token, so any file is valid input, UTF-8 or not. A folder is read
recursively; only files whose name ends in one of the configured suffixes count (an empty list of
suffixes means every regular file), and links to folders are not followed.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import sysconfig
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.recipes.config import DataConfig

_FINGERPRINT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Windows:
    """A text, or a row of tokens, in windows of ``context`` that do not overlap.

    Window ``i`` predicts the bytes ``i*context + 1 .. (i+1)*context`` from those before them, so
    one pass over all windows predicts every byte once.
    """

    data: Tensor
    context: int

    def __len__(self) -> int:
        return max(0, (self.data.numel() - 1) // self.context)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Make inputs and targets, each ``(len(indices), context)`` of int64, for these windows."""
        starts = torch.tensor(indices, dtype=torch.int64, device="cpu") * self.context
        window = torch.arange(self.context + 1, device="cpu")
        rows = self.data[starts[:, None] + window].long()
        return rows[:, :-1], rows[:, 1:]


class Samples(Protocol):
    """Samples by number, as batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> object:
        """Make the batch of these samples: ``(input, target)``, or a mapping."""


class Data(NamedTuple):
    """The samples that are trained on, and those that are held out."""

    training: Samples
    validation: Samples | None
    description: str
    """One line: where the data come from, and how much there is."""
    unit: str
    """``byte``, ``token`` or ``sample``."""
    size: int
    """Units of one sample."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Size and checksum of each part, to recognize other data in a run's description."""
        parts = {"training": self.training, "held out": self.validation}
        return {name: _fingerprint(part) for name, part in parts.items() if part is not None}

    def validation_sample(self, count: int) -> list[int]:
        """List at most ``count`` indices spread evenly over the held-out samples."""
        total = 0 if self.validation is None else len(self.validation)
        count = min(count, total)
        return [position * total // count for position in range(count)]


class _File(NamedTuple):
    path: Path
    relative: str
    size: int

    @property
    def order(self) -> int:
        """A hash of the relative path alone, so every machine chooses the same files."""
        name = self.relative.encode(errors="surrogateescape")
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")


def open_text(config: DataConfig, context: int) -> Data:
    """Read the text that ``config`` names.

    In a folder, every ``validation_every``-th file by a hash of its relative path is held out, at
    least one; of a single file, the last ``1/validation_every`` of its bytes. A file is mapped, a
    folder is read into memory, at most ``max_bytes`` of it, chosen by the same hash.

    Raises ``PlanError`` when the path does not exist, nothing matches, or the text is too short.
    """
    root = Path(config.path or sysconfig.get_paths()["stdlib"]).expanduser()
    if root.is_dir():
        training, validation, description = _read_folder(root, config)
    elif root.is_file():
        training, validation = _split_tail(_map_file(root), config.validation_every)
        description = str(root)
    else:
        raise PlanError(
            f"[data] path: expected a file or a folder of text, found nothing at {root}; "
            "name one that exists, or leave it out to train on Python's standard library"
        )
    return _windows((training, validation), context, "path", root, description, "byte")


def open_tokens(path: Path, config: DataConfig, context: int) -> Data:
    """Map the row of token ids in ``path``; the last ``1/validation_every`` is held out.

    Raises ``PlanError`` when the file has no such row, or it is too short.
    """
    label = f"[data] tokens: expected a .npy file with one row of whole numbers at {path}"
    try:
        row = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise PlanError(f"{label}, found none: {error}") from error
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise PlanError(f"{label}, found {row.dtype} of shape {row.shape}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a read-only array: nothing writes to it
        parts = _split_tail(torch.from_numpy(row), config.validation_every)
    return _windows(parts, context, "tokens", path, str(path), "token")


def _windows(
    parts: tuple[Tensor, Tensor], context: int, key: str, path: Path, about: str, unit: str
) -> Data:
    for part, data in zip(("training", "held-out"), parts, strict=True):
        if data.numel() < context + 1:
            raise PlanError(
                f"[data] {key}: expected at least {context + 1} {unit}s of {part} text (one window "
                f"of [model] context = {context}, and one {unit} more), found {data.numel()} in "
                f"{path}; give more text or a smaller context"
            )
    training, validation = (Windows(data, context) for data in parts)
    sizes = f"{parts[0].numel():,} {unit}s, {parts[1].numel():,} held out"
    return Data(training, validation, f"{about}: {sizes}", unit, context)


def _fingerprint(samples: Samples) -> str:
    """Format size and checksum of a text; beyond 64 MiB, the checksum of its beginning.

    For a dataset, only its size.
    """
    if not isinstance(samples, Windows):
        return f"{len(samples)} items"
    data = samples.data
    checksum = zlib.crc32(data[:_FINGERPRINT_BYTES].contiguous().numpy().data)
    what = "bytes" if data.element_size() == 1 else f"tokens of {data.element_size()} bytes"
    return f"{data.numel()} {what}, crc32 {checksum:08x}"


def unigram_loss(training: Tensor, targets: Tensor) -> float:
    """Compute nats per byte of ``targets`` under the byte frequencies of ``training``.

    This is the loss of a model that knows only how often each byte occurs. One is added to every
    count, so that a byte never seen in training has a finite loss.
    """
    counts = torch.ones(256, dtype=torch.float64, device="cpu")
    for piece in training.split(1 << 24):
        counts += torch.bincount(piece, minlength=256)
    losses = (counts / counts.sum()).log().neg()
    return losses[targets.flatten().long()].mean().item()


def _read_folder(root: Path, config: DataConfig) -> tuple[Tensor, Tensor, str]:
    files = _list_files(root, config)
    if not files:
        wanted = ", ".join(config.suffixes) or "regular files"
        raise PlanError(
            f"[data] path: expected files ({wanted}) that are not empty under {root}, found none; "
            "name another folder or set [data] suffixes"
        )
    files, found = _sample(files, config.max_bytes), len(files)
    description = f"{root} ({found:,} files)"
    if len(files) < found:
        description = f"{root} ({len(files):,} of {found:,} files, [data] max_bytes)"
    if len(files) == 1:
        return *_split_tail(_join(files), config.validation_every), description
    held_out = {file.path for file in files if file.order % config.validation_every == 0}
    if not held_out or len(held_out) == len(files):
        held_out = {min(files, key=lambda file: file.order).path}
    return (
        _join([file for file in files if file.path not in held_out]),
        _join([file for file in files if file.path in held_out]),
        description,
    )


def _list_files(root: Path, config: DataConfig) -> list[_File]:
    """List all files that match, sorted by relative path."""
    files: list[_File] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in config.exclude]
        for name in names:
            path = Path(folder, name)
            if config.suffixes and not name.endswith(config.suffixes):
                continue
            if path.is_file() and (size := path.stat().st_size):
                files.append(_File(path, str(path.relative_to(root)), size))
    return sorted(files, key=lambda file: file.relative)


def _sample(files: list[_File], max_bytes: int) -> list[_File]:
    """Choose files by hash that fit in ``max_bytes`` together, at least one; sorted by path."""
    ordered = sorted(files, key=lambda file: file.order)
    ends = itertools.accumulate(file.size for file in ordered)
    count = sum(end <= max_bytes for end in ends)
    return sorted(ordered[: max(count, 1)], key=lambda file: file.relative)


def _join(files: Sequence[_File]) -> Tensor:
    text = bytearray()
    for file in files:
        try:
            text += file.path.read_bytes()
        except OSError as error:
            raise PlanError(
                f"[data] path: expected to read {file.path}, found: {error.strerror}; "
                "make it readable or exclude its folder ([data] exclude)"
            ) from error
    return torch.frombuffer(text, dtype=torch.uint8)


def _map_file(path: Path) -> Tensor:
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            # A private copy-on-write map: torch wants writable memory, the file stays untouched.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise PlanError(
            f"[data] path: expected to read {path}, found: {error.strerror}; make it readable"
        ) from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _split_tail(data: Tensor, every: int) -> tuple[Tensor, Tensor]:
    boundary = data.numel() - data.numel() // every
    return data[:boundary], data[boundary:]
