"""Whole gradients of this rank that wait for a reduction, as ``.grad`` of what optimizers hold.

After a backward in ``no_sync`` programs find there what has been added up so far: they look at it,
scale it, and drop it with ``zero_grad``. Before the next backward it is taken back.

A gradient that autograd gives to what a unit shows, past the full parameters, is rejected: only a
loss that has read a parameter beside its module makes one, computed with this rank's piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.comm.dtensors.gradient_part import plain, waiting_gradient
from meshwright.data_parallel.shards.replaced_parameters import rank_in
from meshwright.data_parallel.shards.slot import Slot
from meshwright.data_parallel.shards.unit import Unit
from meshwright.torch_internals.tensors import version_of


@dataclass(slots=True, kw_only=True)
class _Shown:
    holder: nn.Parameter
    shell: torch.Tensor
    """The ``.grad``: torch only takes one of the holder's shape, but its data may be any."""
    gradient: torch.Tensor
    """The sum that waits: the shell's data, or in another dtype, of which the shell has a copy."""
    before: torch.Tensor | None
    """Gradients that had been reduced, and wait for more."""
    version: int


class WaitingGradients:
    """The gradients that one unit shows."""

    def __init__(self) -> None:
        self._shown: list[_Shown | None] = []

    def show(
        self,
        name: str,
        holders: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        dtypes: Iterable[torch.dtype],
    ) -> bool:
        """Give each holder, of the unit ``name``, its gradient as ``.grad``; True if any has one.

        ``dtypes`` are those that the parameters compute in, in which autograd gives gradients.
        A norm of these is refused: it would be that of this rank.
        """
        self._shown = [
            None if gradient is None else _show(name, holder, gradient, dtype)
            for holder, gradient, dtype in zip(holders, gradients, dtypes, strict=True)
        ]
        return any(self._shown)

    def take(self) -> list[bool]:
        """Restore the former ``.grad``; returns which were dropped, nothing if none was shown."""
        taken = [each is not None and _take(each) for each in self._shown]
        self._shown.clear()
        return taken


def _show(name: str, holder: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype) -> _Shown:
    before = holder.grad
    holder.grad = shell = waiting_gradient(holder, name)
    shell.data = gradient.to(dtype)
    return _Shown(
        holder=holder, shell=shell, gradient=gradient, before=before, version=version_of(shell)
    )


@torch.no_grad()
def _take(shown: _Shown) -> bool:
    holder, shell, before = shown.holder, shown.shell, shown.before
    found = holder.grad
    is_dropped = found is None
    if found is not None and found is not shell:
        shell.copy_(found)
    if shell.dtype != shown.gradient.dtype and version_of(shell) != shown.version:
        shown.gradient.copy_(plain(shell))
    if before is not None and version_of(shell) != shown.version and not shell.any():
        before.zero_()  # so was all that this stands for
    # Its memory may be freed: callers that still hold the tensor must not read that.
    shell.data = shell.data.new_empty(0)
    holder.grad = None if is_dropped else before
    return is_dropped


class Refusals:
    """The tensors of a unit that autograd must not give a gradient; it costs no step anything."""

    def __init__(self) -> None:
        self._nodes: dict[str, object] = {}
        """Nodes that autograd would accumulate with: their hooks last while somebody holds them."""

    @torch.enable_grad()
    def add(self, unit: Unit, tensor: torch.Tensor, slots: Sequence[Slot], what: str) -> None:
        """Make a backward raise RuntimeError before it gives the leaf ``tensor`` a gradient.

        It is the one tensor named ``what``, and holds this rank's part of ``slots``.
        """
        communicators = unit.communicators
        if all(axis.size == 1 for axis in communicators):
            return
        # Through a view, as a leaf does not show the node that accumulates its gradient.
        trains = tensor.requires_grad
        function = tensor.requires_grad_().view_as(tensor).grad_fn
        tensor.requires_grad_(trains)
        node = None if function is None else function.next_functions[0][0]
        if node is None or node is self._nodes.get(what):
            return

        def refuse(gradients: object) -> None:
            names = [slot.name for slot in slots]
            rest = f" or {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(
                f"rank {rank_in(communicators)}: the loss has read a parameter beside its module, "
                f"{' or '.join(names[:3])}{rest}, of which this rank shows its part: "
                "neither loss nor gradient are those of one process. Compute that term inside of "
                "the forward of the module that uses the parameter, or use fully_shard, whose "
                "parameters are DTensors and may be read; to look at it without a gradient, use "
                "summon_full_params"
            )

        node.register_prehook(refuse)
        self._nodes[what] = node
