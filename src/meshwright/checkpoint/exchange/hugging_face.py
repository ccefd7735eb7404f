"""Folders as `from_pretrained` reads them: safetensors files, an index, a configuration.

::

    config.json
    model.safetensors                      one file, or
    model-00001-of-00002.safetensors       several, of about as many bytes
    model.safetensors.index.json           the file of each tensor

A tied tensor is stored under its first name; the model's configuration says that it is tied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.exchange.weights import Weights, packed
from meshwright.checkpoint.manifest import MANIFEST_NAME
from meshwright.checkpoint.pieces import byte_views
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.tensor_file import DTYPES, Entry, file_map
from meshwright.checkpoint.writing import write_file
from meshwright.errors import CheckpointDamagedError, CheckpointError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SINGLE = "model.safetensors"
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a model's folder besides weights: configurations and tokenizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFormat:
    """Writes a Hugging Face folder."""

    shard_bytes: int
    config: Mapping[str, JSON] | Path | None
    """The configuration, its file, or a folder whose files other than weights are copied."""

    def __post_init__(self) -> None:
        if not isinstance(self.config, Path):
            return
        file = self.config / CONFIG if self.config.is_dir() else self.config
        if not file.exists():
            raise CheckpointError(
                f"config: expected the configuration of a model, or a folder with a {CONFIG}; "
                f"found no {file}"
            )
        _read_json(file)

    def begin(self, weights: Weights, folder: Path) -> None:
        """See `Format`."""

    def write(self, weights: Weights, folder: Path, rank: int, size: int) -> JSON:
        """Write every ``size``-th file."""
        files = self._files(weights)
        for name in list(files)[rank::size]:
            entries = [
                Entry(key=key, dtype=weights.entries[key].dtype, shape=weights.entries[key].shape)
                for key in files[name]
            ]
            at = file_map(name, 0, entries)
            views = byte_views(weights.read(key).reshape(-1) for key in at.spans)
            write_file(Storage(), folder / name, at.header, views)
        return None

    def finish(self, weights: Weights, folder: Path, answers: Sequence[JSON]) -> Path:
        """Write the index and the configuration."""
        files = self._files(weights)
        if len(files) > 1:
            total = sum(entry.size for entry in weights.entries.values())
            where = {key: name for name, keys in files.items() for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            _write_json(folder / INDEX, index)
        config = weights.config if self.config is None else self.config
        if isinstance(config, Path):
            if config.is_dir():
                for pattern in _BESIDE:
                    for file in sorted(config.glob(pattern)):
                        if file.name != INDEX:
                            write_file(Storage(), folder / file.name, file.read_bytes(), [])
            else:
                write_file(Storage(), folder / CONFIG, config.read_bytes(), [])
        elif config is not None:
            _write_json(folder / CONFIG, config)
        return folder

    def _files(self, weights: Weights) -> dict[str, list[str]]:
        runs = packed(weights, self.shard_bytes)
        if len(runs) == 1:
            return {_SINGLE: runs[0]}
        return {
            f"model-{number:05d}-of-{len(runs):05d}.safetensors": run
            for number, run in enumerate(runs, 1)
        }


def _write_json(path: Path, value: object) -> None:
    write_file(Storage(), path, (json.dumps(value, indent=2) + "\n").encode(), [])


def read_hugging_face(folder: Path) -> Weights:
    """Open the weights of a Hugging Face folder, or of one safetensors file."""
    where: dict[str, JSON] = {}
    if folder.is_file():
        folder, files = folder.parent, [folder.name]
    elif (folder / INDEX).exists():
        found = _read_json(folder / INDEX).get("weight_map")
        where = found if isinstance(found, dict) else {}
        files = list(dict.fromkeys(map(str, where.values())))
    elif (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"{folder} is a checkpoint already: load it, or export it to hf")
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no safetensors files: expected {_SINGLE}, or {INDEX} and its files; "
            "weights in pytorch_model.bin are read with --from torch"
        )
    known = {theirs: ours for ours, theirs in DTYPES.items()}
    entries: dict[str, Entry] = {}
    for file in files:
        if Path(file).name != file:
            raise CheckpointDamagedError(f"{folder / INDEX}: {file!r} is not a file beside it")
        with _open(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if where.get(name, file) != file:
                    continue  # the index names another file
                if name in entries:
                    raise CheckpointError(
                        f"{folder}: {name!r} is in {entries[name].key} and in {file}: give the "
                        f"one file that is meant, or a folder with {INDEX}"
                    )
                piece = opened.get_slice(name)
                if piece.get_dtype() not in known:
                    raise CheckpointError(
                        f"{folder / file}: {name!r} is {piece.get_dtype()}, which is not known here"
                    )
                shape, dtype = tuple(piece.get_shape()), known[piece.get_dtype()]
                entries[name] = Entry(key=file, dtype=dtype, shape=shape)

    if missing := [name for name in where if name not in entries]:
        raise CheckpointDamagedError(
            f"{folder / INDEX}: {missing[0]!r} is in none of its files ({len(missing)} of "
            f"{len(where)} names are not): restore the folder from a copy"
        )

    def read(name: str) -> Tensor:
        with _open(folder / entries[name].key) as opened:
            return opened.get_tensor(name)

    config = folder / CONFIG
    found = _read_json(config) if config.exists() else None
    return Weights(entries=entries, read=read, config=found)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointDamagedError(f"{path} is no safetensors file: {error}") from None


def _read_json(path: Path) -> dict[str, JSON]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointDamagedError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointDamagedError(f"{path}: expected a JSON object")
    return found
