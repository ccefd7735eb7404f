"""Buffers that are kept equal on all ranks: one rank's values are broadcast to the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.data_parallel.checks.starting_state import broadcast_tensors, compare_parameters
from meshwright.data_parallel.modules.module_tensors import ModuleBuffers


class EqualBuffers:
    """Gives the ranks of ``communicator`` the buffers of one of them.

    Buffers of ``ignored`` modules, and those listed in ``names``, are left alone. Number, shapes
    and dtypes are equal on all ranks at first; they are compared again after a change.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        ignored: Collection[nn.Module] = (),
        names: Collection[str] = (),
    ) -> None:
        self._communicator = communicator
        self._held = ModuleBuffers(module, ignored, names)
        self._alike = self._held.named
        """Those that were last known to be alike on all ranks."""

    def look(self) -> Mapping[str, torch.Tensor]:
        """The buffers that the module holds now, by name."""
        return self._held.look()

    def follow(self) -> Mapping[str, torch.Tensor]:
        """Return `look()`; a collective if buffers were added, removed or changed in kind.

        Raises CollectiveMismatchError on every rank, naming the buffer, where they differ.
        """
        buffers = self._held.look()
        if buffers is not self._alike:
            before, now = _kinds(self._alike), _kinds(buffers)
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            if changed:
                reason = f": buffer {changed[0]!r} is of another kind"
                compare_parameters(self._communicator, (), buffers=buffers, reason=reason)
            self._alike = buffers
        return buffers

    def synchronize(self, source: int = 0) -> None:
        """Give every rank the buffers of rank ``source`` of the axis; a collective.

        Raises CollectiveMismatchError as `follow` does.
        """
        self.follow()
        self.broadcast(source)

    def broadcast(self, source: int) -> None:
        """Broadcast as `synchronize` does, right after `follow` was called."""
        found = self._alike.values()
        broadcast_tensors(self._communicator, found, label="broadcast buffers", source=source)


def _kinds(buffers: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: (b.shape, b.dtype, b.stride()) for name, b in buffers.items()}
