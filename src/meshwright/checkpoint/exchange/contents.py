"""The contents of a checkpoint as a tree, and the differences of two checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.manifest import TensorRecord
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.tensor_file import item_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint's contents by its manifest: files, metadata of tensors, other values."""

    step: int
    ranks: int | None
    """The number of ranks that saved it, if known."""
    files: Mapping[str, int]
    """The bytes of each file."""
    tensors: Mapping[str, Mapping[str, JSON]]
    """By name, dtype, shape, bytes, and layout (the pieces in which it was saved)."""
    values: Mapping[str, JSON]
    """All values that are not tensors, by dotted path."""

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Yield a tree of ``depth`` levels, with sums of what is below; 0 means all levels."""
        total = sum(self.files.values())
        saved = "" if self.ranks is None else f", saved on {self.ranks} ranks"
        yield (
            f"step {self.step}{saved}: {len(self.tensors)} tensors, {total:,} bytes in "
            f"{len(self.files)} files"
        )
        tree: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            *path, leaf = name.replace("/", ".").split(".")
            inner = tree
            for part in path:
                inner = inner.setdefault(part, {})
            inner.setdefault(leaf, {})[""] = tensor
        yield from _branch(tree.get("state", tree) if len(tree) == 1 else tree, 0, depth)
        if self.values:
            yield "values"
        folded: dict[str, list[JSON]] = {}
        for place, value in self.values.items():
            folded.setdefault(".".join(place.split(".")[: depth or None]), []).append(value)
        for place, values in folded.items():
            text = str(values[0]) if len(values) == 1 else f"{len(values)} values"
            yield f"  {place} = {text if len(text) <= 60 else text[:57] + '...'}"


def _branch(tree: Mapping[str, Any], depth: int, deepest: int) -> Iterator[str]:
    for name, inner in tree.items():
        if name == "":
            continue
        below = {key: value for key, value in inner.items() if key}
        tensor = inner.get("")
        title = f"{'  ' * depth}{name}"
        if tensor is not None:
            shape = tuple(tensor["shape"])
            size, layout = tensor["bytes"], tensor["layout"]
            yield f"{title:<40} {tensor['dtype']} {shape}, {size:,} B, {layout}"
        else:
            count, size = _sum(inner)
            yield f"{title:<40} {count} tensors, {size:,} B"
        if depth + 1 != deepest:
            yield from _branch(below, depth + 1, deepest)


def _sum(tree: Mapping[str, Any]) -> tuple[int, int]:
    count, size = 0, 0
    for name, inner in tree.items():
        more = (1, inner["bytes"]) if name == "" else _sum(inner)
        count, size = count + more[0], size + more[1]
    return count, size


def contents(path: str | os.PathLike[str]) -> Contents:
    """Return the contents of a checkpoint. Reads only its manifest; raises as `Reader`."""
    with Reader(path) as reader:
        manifest = reader.manifest
    ranks = manifest.metadata.get("ranks")
    state = manifest.metadata.get("state")
    rest = {} if isinstance(state, dict) else dict(manifest.metadata)
    return Contents(
        step=manifest.step,
        ranks=ranks if isinstance(ranks, int) else None,
        files={name: at.size for name, at in manifest.file_maps.items()},
        tensors={
            name: {
                "dtype": record.dtype,
                "shape": list(record.shape),
                "bytes": math.prod(record.shape) * item_size(record.dtype),
                "layout": _layout(record),
            }
            for name, record in manifest.tensors.items()
        },
        values=dict(_values(state if isinstance(state, dict) else rest, "")),
    )


def _layout(record: TensorRecord) -> str:
    if len(record.pieces) <= 1:
        return "whole"
    cut = [d for d, n in enumerate(record.shape) if any(p.box.shape[d] != n for p in record.pieces)]
    along = f"dim {cut[0]}" if len(cut) == 1 else f"dims {', '.join(map(str, cut))}"
    return f"{len(record.pieces)} pieces along {along}"


def _values(structure: JSON, place: str) -> Iterator[tuple[str, JSON]]:
    """Yield the values that are not names of tensors, by dotted path."""
    if isinstance(structure, dict):
        if structure.keys() == {"$tensor"}:
            return
        for key, inner in structure.items():
            yield from _values(inner, f"{place}.{key}".lstrip("."))
    elif isinstance(structure, list) and not all(map(_is_plain, structure)):
        for number, inner in enumerate(structure):
            yield from _values(inner, f"{place}.{number}")
    else:
        yield place, structure


def _is_plain(value: JSON) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


# -------------------------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor or value in which two checkpoints differ."""

    name: str
    text: str
    largest: float = math.inf
    """The largest difference of two elements; infinite if they cannot be compared."""
    relative: float = math.inf
    """The same, relative to the largest element."""


def differences(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> list[Difference]:
    """List the tensors, by relative difference, and the values in which two checkpoints differ.

    Holds one tensor of each at a time, and verifies what it reads. Raises as `Reader`.
    """
    found: list[Difference] = []
    with Reader(first) as one, Reader(second) as other:
        here, there = one.manifest.tensors, other.manifest.tensors
        for name in dict.fromkeys([*here, *there]):
            if name not in there or name not in here:
                where = first if name in here else second
                found.append(Difference(name=name, text=f"only in {where}"))
                continue
            a, b = here[name], there[name]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                text = f"{a.dtype} {a.shape} and {b.dtype} {b.shape}"
                found.append(Difference(name=name, text=text))
            elif difference := _compared(name, one.read(name), other.read(name)):
                found.append(difference)
        values = [dict(_values(dict(each.manifest.metadata), "")) for each in (one, other)]
    for place in dict.fromkeys([*values[0], *values[1]]):
        a, b = (each.get(place, "nothing") for each in values)
        if a != b:
            found.append(Difference(name=place, text=f"{str(a)[:60]} and {str(b)[:60]}"))
    return sorted(found, key=lambda each: -each.relative)


_EXACT = 2.0**62
"""Integers that differ by less can be subtracted in 64 bits."""


def _compared(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    bits = [each.reshape(-1, 1).view(torch.uint8) for each in (a, b)]
    differs = (bits[0] != bits[1]).any(dim=1).reshape(a.shape)
    if not differs.any():
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    sizes = torch.maximum(a.to(wide).abs(), b.to(wide).abs())
    finite = sizes[sizes.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    apart = (a[differs].to(wide) - b[differs].to(wide)).abs()
    is_whole = not (
        a.is_complex() or a.is_floating_point() or a.dtype in (torch.bool, torch.uint64)
    )
    if is_whole and float(apart.max()) < _EXACT:  # float64 cannot represent all int64
        apart = (a[differs].to(torch.int64) - b[differs].to(torch.int64)).abs()
    largest = float(apart.max())
    relative = largest / scale if scale else 0.0
    if not math.isfinite(largest):
        largest = relative = math.inf
    count = int(differs.sum())
    text = f"{count:,} of {a.numel():,} elements, by up to {largest:.3g}, relative {relative:.3g}"
    return Difference(name=name, text=text, largest=largest, relative=relative)
