"""C's heap: its free end goes back to the system, which clears pages before it gives them again.

A page that comes back costs more than most of what a small layer does with it. glibc gives back
what is free beyond twice its bound for large blocks, and has blocks above that bound mapped each by
itself. The bound follows the largest such block that has been freed, up to 32 MiB (mallopt(3),
M_MMAP_THRESHOLD). A program that never frees a large one, as that of small layers, keeps the bounds
with which it has begun, and gives its heap back and gets it again in each step.
"""

from __future__ import annotations

import torch

_LARGEST = (32 << 20) - (64 << 10)
"""Bytes of the largest block that counts, with room for what the allocator adds to it."""


def keep_freed() -> None:
    """Make C's heap keep up to 64 MiB that are free, and serve blocks of up to 32 MiB from it.

    A program that has freed one block of this size behaves so anyway. No page of the block that is
    freed here is touched. Other allocators than glibc's take no notice.
    """
    # Freed at once: glibc raises its bounds when it frees such a block.
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
