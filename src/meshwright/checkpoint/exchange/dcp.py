"""Folders of torch's distributed checkpoint, weights only.

::

    .metadata        a pickle: each tensor's chunks, and where they are
    __0_0.distcp     the chunks that rank 0 has written, each as `torch.save` writes it

The pickle is read without torch's reader, which would run any code in it: an allowlist of a dozen
names is replaced by plain records, all others are rejected. Chunks are read weights only.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.exchange.weights import Weights
from meshwright.checkpoint.manifest import covers
from meshwright.checkpoint.pieces import dtype_name, torch_dtype
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.tensor_file import DTYPES, Entry
from meshwright.checkpoint.writing import write_file
from meshwright.errors import CheckpointDamagedError, CheckpointError
from meshwright.layout import Box
from meshwright.torch_internals.checkpoints import StorageInfo

METADATA = ".metadata"
PREFIX = "model"
"""The name below which weights are written, as in ``dcp.save({"model": ...})``."""


class DcpFormat:
    """Writes a folder of torch's distributed checkpoint."""

    def begin(self, weights: Weights, folder: Path) -> None:
        """See `Format`."""

    def write(self, weights: Weights, folder: Path, rank: int, size: int) -> JSON:
        """Write the file of ``rank``; returns file, start and length of each tensor."""
        places: dict[str, JSON] = {}
        path = folder / f"__{rank}_0.distcp"
        with path.open("xb") as file:
            for name in weights.share(rank, size):
                start = file.tell()
                torch.save(weights.read(name), file)
                places[name] = [path.name, start, file.tell() - start]
            file.flush()
            os.fsync(file.fileno())
        return places

    def finish(self, weights: Weights, folder: Path, answers: Sequence[Any]) -> Path:
        """Write the metadata; tied tensors are described under each name, and stored once."""
        places = {name: place for each in answers for name, place in each.items()}
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        first = {**{name: name for name in weights.entries}, **weights.ties}
        for name, one in first.items():
            entry, key = weights.entries[one], f"{PREFIX}.{name}"
            start, size = torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
            chunk = ChunkStorageMetadata(offsets=start, sizes=size)
            properties = TensorProperties(dtype=torch_dtype(entry.dtype))
            tensors[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
            stored[MetadataIndex(key, start)] = StorageInfo(*places[one])
        metadata = Metadata(
            state_dict_metadata=tensors,
            planner_data={f"{PREFIX}.{name}": (PREFIX, name) for name in first},
            storage_data=stored,
            storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        )
        write_file(Storage(), folder / METADATA, pickle.dumps(metadata), [])
        return folder


# ------------------------------------------------------------------------------------ reading


class _Record:
    """A stand-in for an object of a pickle: it keeps the state and runs nothing."""

    state: Any

    def __init__(self, *args: object) -> None:
        self.state = dict[str, Any]()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - of any file
        return self.state[key]


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of a distributed checkpoint, and rejects any other pickle."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - see pickle
        """Return the stand-in for an allowed name; CheckpointDamagedError for any other."""
        if module == "torch" and name in DTYPES:
            return torch_dtype(name)
        if (module, name) not in _ALLOWED:
            raise CheckpointDamagedError(
                f"its pickle names {module}.{name}, which no distributed checkpoint of weights has"
            )
        return _ALLOWED[module, name]


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": (StorageInfo.__name__,),
    "torch.serialization": ("_get_layout",),
}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(module, name): _Record for module, names in _CLASSES.items() for name in names},
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
}


def read_dcp(folder: Path, key: str) -> Weights:
    """Open the weights below ``key`` in a folder of torch's distributed checkpoint.

    Tensors stored in the same places are tied.
    """
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no distributed checkpoint of torch: it has no {METADATA}"
        )
    try:
        chunks, others = _chunks(path, key)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{path}: {error}") from None
    except Exception as error:  # a pickle may be anything
        raise CheckpointDamagedError(f"{path} cannot be read: {error!r}") from error
    if not chunks:
        raise CheckpointError(f"{folder} has no tensors below {key!r}, but {', '.join(others[:8])}")
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, (_, own) in chunks.items():
        places = tuple((info["relative_path"], info["offset"]) for _, info in own)
        one = first.setdefault(places, name) if places else name
        if one != name:
            ties[name] = one

    def read(name: str) -> Tensor:
        entry, own = chunks[name]
        tensor: Tensor | None = None
        for box, info in own:
            part = _read_chunk(folder, entry.key, info)
            if part.shape != box.shape or dtype_name(part.dtype) != entry.dtype:
                raise CheckpointDamagedError(
                    f"{folder}: a chunk of {entry.key!r} is {part.dtype} {tuple(part.shape)}, "
                    f"expected {entry.dtype} {box.shape}"
                )
            if len(own) == 1:
                return part
            if tensor is None:
                tensor = torch.empty(entry.shape, dtype=part.dtype, device="cpu")
            tensor[box.slices()] = part
        if tensor is None:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
        return tensor

    entries = {name: entry for name, (entry, _) in chunks.items() if name not in ties}
    return Weights(entries=entries, ties=ties, read=read)


_Chunks = dict[str, tuple[Entry, list[tuple[Box, _Record]]]]
"""By name, a tensor's entry, and its boxes with their places; none without elements."""


def _chunks(path: Path, key: str) -> tuple[_Chunks, list[str]]:
    """Return the tensors below ``key``, and the names of all others."""
    metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    listed = dict(metadata["state_dict_metadata"])
    stored = {(at["fqn"], at.state.get("offset")): i for at, i in metadata["storage_data"].items()}
    key = key or (PREFIX if any(name.startswith(f"{PREFIX}.") for name in listed) else "")
    prefix = f"{key}." if key else ""
    found: _Chunks = {}
    others: list[str] = []
    for name, each in listed.items():
        if not name.startswith(prefix) or "chunks" not in each.state:
            others.append(name)
            continue
        dtype, shape = dtype_name(each["properties"].state[0]), each["size"]
        boxes = [Box(chunk["offsets"], chunk["sizes"]) for chunk in each["chunks"]]
        boxes = [box for box in boxes if box.numel]
        covers(shape, boxes)
        own = [(box, stored[name, box.offset]) for box in boxes]
        found[name[len(prefix) :]] = Entry(key=name, dtype=dtype, shape=shape), own
    return found, others


def _read_chunk(folder: Path, name: str, info: _Record) -> Tensor:
    file = info["relative_path"]
    if Path(file).name != file:
        raise CheckpointDamagedError(f"{folder}: {name!r} lies in {file!r}, outside of the folder")
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{folder}: {name!r} is compressed, which is not read here")
    try:
        with (folder / file).open("rb") as opened:
            window = _Window(opened, info["offset"], info["length"])
            found = torch.load(cast(BinaryIO, window), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its reader of zip files and pickles does
        raise CheckpointDamagedError(
            f"{folder / file}: {name!r} cannot be read: {error!r}"
        ) from error
    if not isinstance(found, Tensor):
        raise CheckpointDamagedError(f"{folder / file}: {name!r} is no tensor")
    return found


class _Window(io.RawIOBase):
    """A range of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - see io
        """Read into ``buffer`` up to the end of the range; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        done = self._file.readinto(view[:count])
        self._at += done
        return done
