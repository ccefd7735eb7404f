"""The buffers of a module that are kept equal: one rank's for all, whichever they are now."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.data_parallel.checks.starting_state import broadcast_tensors, compare_parameters
from meshwright.data_parallel.modules.module_tensors import ModuleBuffers


class EqualBuffers:
    """Gives the ranks of ``communicator`` the buffers that one of them has.

    Those of ``ignored`` modules are left alone, and those that ``names`` lists. All ranks have them
    alike at first, in number, shape and dtype. Where that changes they are compared again.
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
        """Return what `look` does; a collective if buffers were added, removed or changed in kind.

        Raises CollectiveMismatchError on every rank, naming the buffer, where they are not alike.
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
        """Do as `synchronize`, where `follow` has just been called."""
        found = self._alike.values()
        broadcast_tensors(self._communicator, found, label="broadcast buffers", source=source)


def _kinds(buffers: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: (b.shape, b.dtype, b.stride()) for name, b in buffers.items()}
