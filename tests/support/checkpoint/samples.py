"""Tensors and checkpoints that the tests of this folder share."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import JSON, ShardedPiece, load_tensors, save_tensors
from support.checkpoint.faulty_storage import on_ranks
from support.internals.checkpoint import DTYPES, torch_dtype
from support.internals.layout import Box, boxes

__all__ = [
    "METADATA",
    "assert_equal",
    "every_dtype",
    "flat_shard",
    "header_bytes",
    "save_sharded",
    "small",
    "whole_box",
]

METADATA: dict[str, JSON] = {"seed": 7, "sampler": {"position": 640}, "lr": 0.1, "plan": None}


def small(seed: int) -> dict[str, Tensor]:
    """A few tensors of different shapes and dtypes, 2.6 KB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(12, 16, generator=generator),
        "layers.0.bias": torch.randn(12, generator=generator),
        "layers.1.weight": torch.randn(5, 3, 7, generator=generator, dtype=torch.float64),
        "half": torch.randn(31, generator=generator).bfloat16(),
        "mask": torch.rand(13, generator=generator) > 0.5,
        "count": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }


def every_dtype() -> dict[str, Tensor]:
    """Random bits in every dtype that safetensors holds (bools are 0 or 1)."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}
    for name in DTYPES:
        raw = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=generator)
        raw = raw % 2 if name == "bool" else raw
        typed = raw.view(torch_dtype(name))
        found[name] = typed[: typed.numel() // 5 * 5].view(5, -1)
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, shapes, dtypes and bits (so that NaN equals itself)."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        a = found[name].contiguous().reshape(-1).view(torch.uint8)
        b = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), name


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def flat_shard(tensor: Tensor, rank: int, size: int) -> ShardedPiece:
    """The part of a flattened tensor that one of ``size`` ranks holds, cut at any element."""
    shape = tuple(tensor.shape)
    numel = math.prod(shape)
    start, stop = numel * rank // size, numel * (rank + 1) // size
    flat = tensor.reshape(-1)[start:stop].clone()
    return ShardedPiece(global_shape=shape, boxes=tuple(boxes(shape, start, stop)), tensor=flat)


def save_sharded(
    folder: Path, tensors: Mapping[str, Tensor], *, step: int = 120, size: int = 3
) -> Path:
    """A checkpoint written by ``size`` ranks that each hold a flat shard of every tensor."""
    results = on_ranks(
        size,
        lambda group: save_tensors(
            folder,
            {name: flat_shard(tensor, group.rank, size) for name, tensor in tensors.items()},
            METADATA,
            step=step,
            communicator=group,
        ),
    )
    for result in results:
        assert isinstance(result, Path), result
    path = results[0]
    assert isinstance(path, Path)
    assert_equal(load_tensors(path).tensors, tensors)
    return path


def header_bytes(path: Path) -> int:
    """Length of the header of a safetensors file."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
