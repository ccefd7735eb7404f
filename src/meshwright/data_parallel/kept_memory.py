"""Memory of one large gradient that is kept from pass to pass.

Fresh memory of this size costs more than to copy the gradient into it. Memory that somebody still
holds from a pass before is left to them, so nobody can tell it from a new tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

__all__ = ["KeptMemory"]


class KeptMemory:
    """Memory in which tensors of ``numel`` elements lie, one after the other."""

    def __init__(
        self, numel: int, dtype: torch.dtype, allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> None:
        self._numel, self._dtype = numel, dtype
        self._allocate = allocate
        # Now and not in the first backward pass, where it would lie among what autograd frees.
        self._kept, self._offset = self._fresh()
        """The memory, and the element of it at which tensors begin."""

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], device: torch.device
    ) -> torch.Tensor | None:
        """An uninitialised tensor, unless somebody holds also what was allocated just now.

        It is no view of another tensor: the user may detach it in place.
        """
        if not _is_ours_alone(self._kept):
            self._kept, self._offset = self._fresh()
        if not _is_ours_alone(self._kept):
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=device)
        return tensor.set_(self._kept, self._offset, tuple(shape), tuple(stride))

    def _fresh(self) -> tuple[torch.UntypedStorage, int]:
        base = self._allocate(self._numel, self._dtype)
        return base.untyped_storage(), int(base.storage_offset())


def _is_ours_alone(storage: torch.UntypedStorage) -> bool:
    """Check that no tensor and no other name uses ``storage``."""
    # References: the attribute, the name here, the argument of the call.
    return torch._C._storage_Use_Count(storage._cdata) == 1 and sys.getrefcount(storage) <= 3
