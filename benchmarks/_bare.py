"""A few collectives written by hand over shared memory: what their transport cannot be below."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Bare"]

LOOKS = 10_000
"""Looks at a rank's number before others may have the core."""
LINE = 64
"""Bytes of a line of the cache: each rank's number has one of its own."""


class Bare:
    """Barrier, reduce-scatter and ring of processes that are forked after it was made.

    No queue, no names, no checks, no failures: a rank writes to its slot, raises its number and
    looks at those of the others. Slots take turns, so that one barrier a call is enough. It relies
    on stores that become visible in their order, as on x86.
    """

    def __init__(self, size: int, nbytes: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, size * (LINE + 2 * nbytes))
        self._numbers = memoryview(self._memory)[: size * LINE].cast("q")
        floats = torch.frombuffer(self._memory, dtype=torch.float32, offset=size * LINE)
        self._slots = floats.view(2, size, -1)
        self._turn = 0

    def calls(self, rank: int, whole: Tensor, other: Tensor) -> dict[str, Callable[[], object]]:
        """Make the operations of ``rank`` on tensors of the slots' size."""
        share = whole.numel() // self._size
        own = torch.empty(share)
        before = (rank - 1) % self._size

        def reduce_scatter() -> None:
            slots = self._slots[self._turn % 2]
            slots[rank].copy_(whole)
            self._meet(rank)
            torch.sum(slots[:, rank * share : (rank + 1) * share], dim=0, out=own)

        def ring() -> None:
            slots = self._slots[self._turn % 2]
            slots[rank].copy_(whole)
            self._meet(rank)
            other.copy_(slots[before])

        return {"barrier": lambda: self._meet(rank), "reduce_scatter": reduce_scatter, "ring": ring}

    def _meet(self, rank: int) -> None:
        self._turn += 1
        numbers, turn = self._numbers, self._turn
        step = LINE // 8
        numbers[rank * step] = turn
        for place in range(0, self._size * step, step):
            looks = 0
            while numbers[place] < turn:
                looks += 1
                if looks % LOOKS == 0:
                    os.sched_yield()
