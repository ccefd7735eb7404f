"""The commands ``meshwright checkpoint ...``: their options and output."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from meshwright import checkpoint
from meshwright.comm import connect, disconnect
from meshwright.environment import is_launched
from meshwright.errors import PlanError


def _checkpoint(folder: str) -> Path:
    """Return ``folder`` as a path. Raises ``PlanError`` for a run or a folder of checkpoints."""
    path = Path(folder)
    runs = path / "checkpoints"
    for inner, kind in ((runs, "a run"), (path, "a folder of checkpoints")):
        if inner.is_dir() and (inner == runs or any(inner.glob("step_*"))):
            newest = checkpoint.latest(inner) or inner / "step_..."
            raise PlanError(f"{folder}: expected a checkpoint, found {kind}: give {newest}")
    return path


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Verify every byte of a checkpoint."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """The checkpoint: a folder such as checkpoints/step_00000300."""

    def run(self, words: list[str]) -> int:
        """Verify, and print what the checkpoint holds."""
        manifest = checkpoint.verify(_checkpoint(self.folder))
        total = sum(file.size for file in manifest.file_maps.values())
        print(
            f"{self.folder}: sound, step {manifest.step}, {len(manifest.tensors)} tensors, "
            f"{total:,} bytes"
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Show the tensors of a checkpoint as a tree, with sizes and layout, and its values.

    Reads only the manifest; `meshwright checkpoint verify` checks every byte.
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """The checkpoint: a folder such as checkpoints/step_00000300."""
    depth: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """Levels of the tree to show, with the sums of deeper ones; 0 means all."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""

    def run(self, words: list[str]) -> int:
        """Print the contents."""
        if self.depth < 0:
            raise PlanError(f"--depth: expected a number of at least 0, found {self.depth}")
        found = checkpoint.contents(_checkpoint(self.folder))
        print(json.dumps(asdict(found)) if self.json else "\n".join(found.lines(self.depth)))
        return 0


@dataclass(frozen=True, kw_only=True)
class DiffCommand:
    """List the tensors and values in which two checkpoints differ, the largest difference first.

    The exit status is 0 without a difference, else 1.
    """

    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER_A")]
    """A checkpoint."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER_B")]
    """Another one."""
    largest: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Number of differences to print; 0 means all."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""

    def run(self, words: list[str]) -> int:
        """Print the differences."""
        if self.largest < 0:
            raise PlanError(f"--largest: expected a number of at least 0, found {self.largest}")
        found = checkpoint.differences(_checkpoint(self.first), _checkpoint(self.second))
        shown = found[: self.largest or None]
        if self.json:
            rows = [{k: _finite(v) for k, v in asdict(each).items()} for each in shown]
            print(json.dumps({"count": len(found), "differences": rows}))
            return int(bool(found))
        for each in shown:
            print(f"{each.name}: {each.text}")
        more = f", {len(shown)} of them shown" if len(shown) < len(found) else ""
        print(f"differences: {len(found)}{more}" if found else "no difference")
        return int(bool(found))


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the weights of a checkpoint in another format.

    Formats: hf (a Hugging Face folder: safetensors files, index, configuration), dcp (a folder of
    torch.distributed.checkpoint), torch (a file for torch.load, weights only). Under torchrun, the
    ranks share the work. Nothing is overwritten.
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """The checkpoint: a folder such as checkpoints/step_00000300."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """The folder or file to write."""
    to: Annotated[str, tyro.conf.arg(metavar="FORMAT")]
    """hf, dcp or torch."""
    config: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """For hf: a config.json, or a folder whose configuration and tokenizer are copied."""
    dtype: Annotated[str, tyro.conf.arg(metavar="DTYPE")] = ""
    """Convert floating-point weights to float32, bfloat16, ...; by default, nothing changes."""
    shard_mb: Annotated[int, tyro.conf.arg(metavar="N")] = 5000
    """For hf: the largest size of a file, in MB."""

    def run(self, words: list[str]) -> int:
        """Write the weights, and print where they are."""
        _known("--to", self.to)
        if self.shard_mb < 1:
            raise PlanError(f"--shard-mb: expected a number of at least 1, found {self.shard_mb}")
        with _LaunchedRanks() as ranks:
            try:
                checkpoint.export_weights(
                    _checkpoint(self.folder),
                    self.target,
                    to=self.to,
                    config=self.config or None,
                    dtype=_dtype(self.dtype),
                    shard_bytes=self.shard_mb * 10**6,
                )
            except ValueError as error:
                raise PlanError(str(error)) from error
        if ranks.is_first:
            print(f"wrote {self.target}: {checkpoint.FORMATS[self.to]}")
            if self.to == "hf" and not (Path(self.target) / "config.json").exists():
                print("without config.json, which from_pretrained needs: add one with --config")
        return 0


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Make a checkpoint from weights in another format. Models under any wrapper can load it.

    Formats as for export. The pickle of a dcp folder may contain only classes of an allowlist.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The folder or file to read."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """The folder of checkpoints to write to."""
    source_format: Annotated[str, tyro.conf.arg(name="from", metavar="FORMAT")]
    """hf, dcp or torch."""
    step: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """The step of the checkpoint."""
    key: Annotated[str, tyro.conf.arg(metavar="KEY")] = ""
    """For dcp and torch: the key that holds the weights; by default model, if it exists."""
    dtype: Annotated[str, tyro.conf.arg(metavar="DTYPE")] = ""
    """Convert floating-point weights to float32, bfloat16, ...; by default, nothing changes."""
    trust_pickle: tyro.conf.FlagCreatePairsOff[bool] = False
    """For dcp: trust the source and read the pickle that it begins with."""

    def run(self, words: list[str]) -> int:
        """Write the checkpoint, and print what is in it."""
        _known("--from", self.source_format)
        with _LaunchedRanks() as ranks:
            try:
                path = checkpoint.import_weights(
                    self.source,
                    self.folder,
                    source_format=self.source_format,
                    step=self.step,
                    key=self.key,
                    dtype=_dtype(self.dtype),
                    trust_pickle=self.trust_pickle,
                )
            except ValueError as error:
                raise PlanError(str(error)) from error
        if ranks.is_first:
            count = len(checkpoint.read_manifest(path).tensors)
            print(f"wrote {path}: {count} tensors of a model")
        return 0


class _LaunchedRanks:
    """The ranks that torchrun started, or this process alone."""

    is_first = True

    def __enter__(self) -> _LaunchedRanks:
        if is_launched():
            self.is_first = connect().rank == 0
        return self

    def __exit__(self, *_: object) -> None:
        if is_launched():
            disconnect()


def _known(option: str, name: str) -> None:
    if name not in checkpoint.FORMATS:
        raise PlanError(f"{option}: expected {', '.join(checkpoint.FORMATS)}, found {name}")


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise PlanError(f"--dtype: expected float32, bfloat16, float16 or float64, found {name}")
    return found
