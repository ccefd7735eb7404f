"""Keeps the C heap from returning its free end to the system, which would clear pages again.

Getting a page back costs more than most of what a small layer does with it. glibc returns free
memory beyond twice its bound for large blocks, and maps each block above that bound separately. The
bound grows with the largest such block that was freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD).
A program that never frees a large block, such as one with small layers, keeps the initial bounds,
and returns and regrows its heap in each step.
"""

from __future__ import annotations

import torch

_LARGEST = (32 << 20) - (64 << 10)
"""Bytes of the largest block that counts, with room for what the allocator adds to it."""


def keep_freed() -> None:
    """Make the C heap keep up to 64 MiB of free memory, and serve blocks of up to 32 MiB.

    A program that has freed one block of this size behaves so anyway. No page of the block that is
    freed here is touched. Allocators other than glibc's ignore it.
    """
    # Freed at once: glibc raises its bounds when it frees such a block.
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
