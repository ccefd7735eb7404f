"""One file of torch that `torch.load(weights_only=True)` reads, written by all ranks together.

The first rank writes the file with space for the weights, without loading any; then each rank
writes its share in place. Files are memory-mapped for reading, and no code in their pickle runs.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.exchange.weights import Weights
from meshwright.checkpoint.pieces import byte_views, dtype_name, torch_dtype
from meshwright.checkpoint.tensor_file import Entry
from meshwright.errors import CheckpointDamagedError, CheckpointError
from meshwright.torch_internals.tensors import FakeTensorMode

_NAME = "weights.pt"
_LENGTHS_AT, _HEADER_BYTES = 26, 30
"""In a zip file's local header: offset of the lengths of name and extra field; fixed size."""


class TorchFormat:
    """Writes the weights as one file that `torch.load` reads; each rank writes its share."""

    def begin(self, weights: Weights, folder: Path) -> None:
        """Write the file with fake tensors for the weights, whose bytes are skipped."""
        with FakeTensorMode():
            empty = {
                name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
                for name, entry in weights.entries.items()
            }
        state = {**empty, **{name: empty[first] for name, first in weights.ties.items()}}
        skipping = torch.serialization.skip_data(materialize_fake_tensors=True)
        with (
            skipping,
            (folder / _NAME).open("xb") as file,
        ):  # a path hides what fails
            torch.save(state, file)

    def write(self, weights: Weights, folder: Path, rank: int, size: int) -> JSON:
        """Write this rank's share of the weights in place."""
        path = folder / _NAME
        places = _places(path)
        order = {name: number for number, name in enumerate(weights.entries)}
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in weights.share(rank, size):
                position = places[order[name]]
                for view in byte_views([weights.read(name).reshape(-1)]):
                    done = 0
                    while done < len(view):  # a write may take a part, at most 2 GiB
                        done += os.pwrite(handle, view[done:], position + done)
            os.fsync(handle)
        finally:
            os.close(handle)
        return None

    def finish(self, weights: Weights, folder: Path, answers: Sequence[JSON]) -> Path:
        return folder / _NAME


def _places(path: Path) -> dict[int, int]:
    """Map each tensor's number to the position of its bytes in the file."""
    found: dict[int, int] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if not folder.endswith("/data"):
                continue
            file.seek(info.header_offset + _LENGTHS_AT)
            name, extra = struct.unpack("<HH", file.read(4))
            found[int(number)] = info.header_offset + _HEADER_BYTES + name + extra
    return found


def read_torch_file(path: Path, key: str) -> Weights:
    """Open the weights in a file of torch, below ``key`` if they are nested in it."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: weights in one are read with --from hf or dcp")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is no file of torch.save, is cut off, or is in the format before torch 1.6: "
            "restore it from a copy, or save it anew with torch.save(model.state_dict(), ...)"
        )
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever its reader of zip files and pickles does
        text = " ".join(str(error).split())
        forbidden = re.search(r"Unsupported .*?(?= by default|\. |$)", text)
        reason = forbidden[0] if forbidden else text[:300]
        raise CheckpointError(
            f"{path} cannot be read as weights: {reason}; a file with code has to be saved anew "
            "with torch.save(model.state_dict(), ...)"
        ) from error
    for part in key.split(".") if key else _usual(found):
        if not isinstance(found, Mapping) or part not in found:
            raise CheckpointError(f"{path} has no {key!r}: it holds {_told(found)}")
        found = found[part]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: expected tensors by name, found {_told(found)}")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors but {_told(found)}: name the key of them")
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, value in tensors.items():
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointDamagedError(f"{path}: {name!r} is {value.layout}, not plain")
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        one = first.setdefault(place, name) if value.numel() else name
        if one != name:
            ties[name] = one
    entries = {
        name: Entry(key=name, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        for name, value in tensors.items()
        if name not in ties
    }
    # Return copies: writing to the mapped tensors would not be safe.
    return Weights(
        entries=entries,
        ties=ties,
        read=lambda name: tensors[name].clone(memory_format=torch.contiguous_format),
    )


def _usual(found: object) -> list[str]:
    if isinstance(found, Mapping) and not any(isinstance(v, Tensor) for v in found.values()):
        return [key for key in ("model", "state_dict", "model_state_dict") if key in found][:1]
    return []


def _told(found: object) -> str:
    if isinstance(found, Mapping):
        return f"a dict of {', '.join(map(str, list(found)[:8]))}"
    return f"a {type(found).__name__}"
