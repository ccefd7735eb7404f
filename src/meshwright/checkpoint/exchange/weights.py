"""The weights of a checkpoint or of a foreign file, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.tensor_file import Entry
from meshwright.checkpoint.training.restoring import SavedState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Named tensors that are read one by one; a tied tensor has one entry."""

    entries: Mapping[str, Entry]
    """By name, dtype and shape; ``key`` is the name or file that it is stored under."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Maps other names of tied tensors to the first."""
    read: Callable[[str], Tensor]
    """Reads the full tensor of a name."""
    config: Mapping[str, JSON] | None = None
    """The configuration of the model, if known."""

    def share(self, rank: int, size: int) -> list[str]:
        """List the names that ``rank`` of ``size`` reads, balanced by bytes."""
        loads = [0] * size
        mine: list[str] = []
        for name, entry in sorted(self.entries.items(), key=lambda item: -item[1].size):
            least = min(range(size), key=loads.__getitem__)
            loads[least] += entry.size
            if least == rank:
                mine.append(name)
        return mine


class Format(Protocol):
    """Writes a foreign format into a temporary folder, by all ranks together."""

    def begin(self, weights: Weights, folder: Path) -> None:
        """Prepare the folder, on the first rank."""

    def write(self, weights: Weights, folder: Path, rank: int, size: int) -> JSON:
        """Write this rank's share; returns a value for `finish`."""

    def finish(self, weights: Weights, folder: Path, answers: Sequence[JSON]) -> Path:
        """Write the rest, on the first rank; returns the path that becomes the target."""


def weights_of(reader: Reader) -> Weights:
    """Return the weights in an open checkpoint, by the names of the model."""
    saved = SavedState(reader)
    saved.require(["model"])
    stored = saved.weights()
    first: dict[str, str] = {}
    for name, tensor in stored.items():
        first.setdefault(tensor, name)
    records = reader.manifest.tensors
    extra = saved.structure.get("extra")
    config = extra.get("config") if isinstance(extra, dict) else None
    return Weights(
        entries={
            name: Entry(key=tensor, dtype=records[tensor].dtype, shape=records[tensor].shape)
            for tensor, name in first.items()
        },
        ties={n: first[t] for n, t in stored.items() if first[t] != n},
        read=lambda name: reader.read(stored[name]),
        config=None if config is None else json.loads(json.dumps(saved.read(config))),
    )


def packed(weights: Weights, limit: int) -> list[list[str]]:
    """Group the names into runs of at most ``limit`` bytes, or of one tensor."""
    runs: list[list[str]] = [[]]
    filled = 0
    for name, entry in weights.entries.items():
        if runs[-1] and filled + entry.size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += entry.size
    return runs
