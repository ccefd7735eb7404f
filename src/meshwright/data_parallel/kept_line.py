"""Memory for finished gradients that is kept from step to step while nobody else holds it.

Fresh memory costs page faults, and new tensors on it cost more than what they hold is worth. So the
line, and what an exposure has made of it, is used again as soon as the optimizer has let it go; a
line that somebody still holds is left to them and a new one is made, so nobody can tell.
"""

from __future__ import annotations

import sys

import torch

from meshwright.comm.dtensor import local_of

__all__ = ["KeptLine"]

OURS = 3
"""Python references, seen from a function, to what only an attribute or a container holds."""

COUNTS = sys.version_info < (3, 14)
"""Whether references can be counted: newer interpreters borrow some, and then nothing is reused."""


class KeptLine:
    """A line of elements, with tensors on it that are used again together with it.

    The line itself is not to be given away: only tensors with its memory are, which are counted.
    """

    def __init__(self) -> None:
        self.guests: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors on the line, each with the parameter that it is the gradient of."""
        self._line: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A line, uninitialised, that nobody else uses."""
        line = self._line
        if line is None or line.dtype != dtype or line.device != device or line.numel() != numel:
            return self._renew(numel, dtype, device)
        # References: the attribute, the name here, the argument of the call.
        if not COUNTS or sys.getrefcount(line) > OURS or not self._is_unused(line):
            return self._renew(numel, dtype, device)
        return line

    def holds(self, tensor: torch.Tensor) -> bool:
        """Check that ``tensor`` has the memory of the line that is kept now."""
        return self._line is not None and tensor.data_ptr() == self._line.data_ptr()

    def forget(self) -> None:
        """Keep nothing."""
        self._line = None
        self.guests = []

    def _renew(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.guests = []
        self._line = torch.empty(numel, dtype=dtype, device=device)
        return self._line

    def _is_unused(self, line: torch.Tensor) -> bool:
        """Check that the memory is used by the line and the guests alone, and those by nobody."""
        # One use each by the line, the storage that is asked for here, and each guest's local part.
        used = torch._C._storage_Use_Count(line.untyped_storage()._cdata)
        if used != 2 + len(self.guests):
            return False
        for guest, parameter in self.guests:
            # References to a guest: the pair, the name, the argument. To its part: one less.
            if parameter.grad is guest or sys.getrefcount(guest) > OURS:
                return False
            if local_of(guest) is not guest and sys.getrefcount(local_of(guest)) >= OURS:
                return False
        return True
