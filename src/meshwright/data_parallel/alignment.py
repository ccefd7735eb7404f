"""Whether ranks reduce gradients of the same pass together: a few numbers behind the gradients.

Reductions pair up by their order alone. A rank that runs a backward pass more, or skips one, would
average its gradients with those of another iteration, in silence. So each rank marks where it is:
how often its weights have changed, and which backward pass of its last forward pass this is, each
modulo three::

    weights  backward        sums over four ranks, the last of which is one step behind
    0 1 0    0 1 0           1 3 0    0 4 0      a mark elsewhere than this rank's own

Sums of marks are above zero in any dtype, so the test is exact on any number of ranks; they are not
a number where a rank gave its pass up. Ranks may accumulate different numbers of passes without a
reduction: that is part of the mean's definition.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from meshwright.comm import Communicator
from meshwright.errors import CollectiveMismatchError

__all__ = ["NOTES", "Alignment"]

NOTES = 6
"""Numbers that travel behind the gradients."""


class Alignment:
    """Where this rank is among its backward passes, and whether the others are there too."""

    def __init__(self) -> None:
        self._weights = 0
        self._backwards = 0
        self._version = -1

    def start_over(self) -> None:
        """Count anew: all ranks have the same weights now, however they came to them."""
        self._weights, self._version = 0, -1

    def begin_forward(self, parameters: Sequence[torch.Tensor]) -> None:
        """A forward pass begins: have the weights changed since the one before?"""
        version = sum(parameter._version for parameter in parameters)
        if version != self._version:
            self._version = version
            self._weights += 1
        self._backwards = 0

    def begin_backward(self) -> None:
        """A backward pass that reduces begins."""
        self._backwards += 1

    def write(self, notes: torch.Tensor) -> None:
        """Mark where this rank is."""
        notes.zero_()
        for place in self._marks():
            notes[place] = 1

    def agrees(self, notes: torch.Tensor) -> bool:
        """Whether no rank has another mark. On a GPU it is not asked: that would stop the host."""
        if notes.device.type != "cpu" or not len(notes):
            return True
        sums = (notes.real if notes.is_complex() else notes).tolist()
        mine = self._marks()
        elsewhere = (count for place, count in enumerate(sums) if place not in mine)
        return not any(count > 0 or math.isnan(count) for count in elsewhere)

    def refuse(
        self, communicator: Communicator, *, gave_up: bool = False
    ) -> CollectiveMismatchError:
        """The error that every rank raises then; collective. Who ``gave_up`` raised before."""
        payload = json.dumps([self._weights, self._backwards, gave_up]).encode()
        rows = [json.loads(row) for row in communicator.gather_bytes(payload, label="alignment")]
        texts: list[str] = []
        for rank, (weights, backwards, is_void) in zip(communicator.ranks, rows, strict=True):
            place = (
                f"was in backward pass {backwards} of a forward pass, after {weights - 1} changes "
                "of its weights"
            )
            if is_void:
                place = "gave up a backward pass, in which it had raised"
            texts.append(f"rank {rank} {place}")
        return CollectiveMismatchError(
            f"axis {communicator.axis}: the ranks reduced gradients of different passes together: "
            f"{'; '.join(texts)}. No optimizer has used them. Run as many backward passes on "
            "every rank for each optimizer step, or use join() where ranks run out of batches"
        )

    def _marks(self) -> tuple[int, int]:
        return self._weights % 3, 3 + self._backwards % 3
