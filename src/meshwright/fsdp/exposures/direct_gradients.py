"""The refusal of gradients that autograd gives to what a sharded unit shows, and not to the whole.

A right program never does: modules compute with whole parameters, whose gradients are reduced.
Only a loss that has read a parameter beside them does, and has computed with this rank's piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.data_parallel.shards.replaced_parameters import rank_in
from meshwright.data_parallel.shards.unit import Slot, Unit

__all__ = ["Refusals"]


class Refusals:
    """The tensors of a unit that autograd must not give a gradient; it costs no step anything."""

    def __init__(self) -> None:
        self._nodes: dict[str, object] = {}
        """What autograd would accumulate with: its hook lasts as long as somebody holds it."""

    @torch.enable_grad()
    def add(self, unit: Unit, tensor: torch.Tensor, slots: Sequence[Slot], what: str) -> None:
        """Make a backward raise RuntimeError before it gives the leaf ``tensor`` a gradient.

        It is the one tensor named ``what``, and holds this rank's part of ``slots``.
        """
        communicators = unit.communicators
        if all(axis.size == 1 for axis in communicators):
            return
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
