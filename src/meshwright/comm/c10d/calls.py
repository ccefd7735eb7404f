"""Calls of ranks as fingerprints: compared before data moves, by shared memory or on request."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

CONTROL_TAGS = 1 << 30
"""The first tag of control data, which on CPUs shares its group with payloads."""

REDUCTION_NAMES = MappingProxyType(
    {
        hash(dist.ReduceOp(operation)): name
        for operation, name in (
            (dist.ReduceOp.SUM, "sum"),
            (dist.ReduceOp.AVG, "avg"),
            (dist.ReduceOp.PRODUCT, "product"),
            (dist.ReduceOp.MAX, "max"),
            (dist.ReduceOp.MIN, "min"),
            (dist.ReduceOp.BAND, "band"),
            (dist.ReduceOp.BOR, "bor"),
            (dist.ReduceOp.BXOR, "bxor"),
        )
    }
)
"""By the hash of c10d's reduction, which tells its kind."""

Options: TypeAlias = Any
"""c10d's options of an operation: a class for each, with the attributes that it has."""


@functools.lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Compute a positive number of 62 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def reduction_of(options: Options) -> str:
    """Find the name of the reduction in c10d's options, or in the reduction itself."""
    if options is None:
        return "sum"
    reduction = getattr(options, "reduceOp", options)
    try:
        return REDUCTION_NAMES[hash(reduction)]
    except KeyError:
        return str(reduction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as all ranks must make it, or as both sides of a message must."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    reduction: str = ""
    root: int | None = None
    """The root's number in the world."""
    more: str = ""
    """What else has to be the same, in words."""
    label: str = ""

    def __str__(self) -> str:
        return f'{self.form} "{self.label}"' if self.label else self.form

    @property
    def form(self) -> str:
        """The call in one phrase, without its label."""
        parts = [self.kind]
        if self.reduction:
            parts.append(self.reduction)
        if self.dtype is not None:
            parts.append(f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}")
        if self.root is not None:
            parts.append(f"root rank {self.root}")
        if self.more:
            parts.append(self.more)
        return " ".join(parts)


def call_of(kind: str, tensors: Sequence[torch.Tensor], **more: Any) -> Call:
    """Describe a call on ``tensors``, of which a list is described one by one."""
    first, rest = (tensors[0], tensors[1:]) if tensors else (None, ())
    others = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in rest)
    if others:
        more["more"] = f"and {others}"
    if first is None:
        return Call(kind=kind, **more)
    return Call(kind=kind, shape=tuple(first.shape), dtype=first.dtype, **more)


class NextLabel(threading.local):
    """The label that a thread gives to what it issues next."""

    label = ""

    def label_next(self, label: str) -> None:
        """Give the next operation ``label``; "" takes it back."""
        self.label = label

    def label_nothing(self, label: str) -> None:
        """Leave the next operation without a label, whatever ``label`` is."""
        del label
        self.label = ""

    def take_label(self) -> str:
        """Take the label for the operation that is issued now."""
        label = self.label
        if label:
            self.label = ""
        return label
