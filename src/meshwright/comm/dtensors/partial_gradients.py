"""Gradients that each rank holds a part of the sum of, added up together at the end of a backward.

A parameter that every rank holds, but uses on other elements of its activations than the others,
gets another gradient on each rank; the gradient is their sum. All of them that a backward pass has
delivered on one axis travel together: one all-reduce for each dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.local_leaves import deliver
from meshwright.comm.graphs.untraced import apart
from meshwright.torch_internals.autograd import at_end_of_backward, running_backward

__all__ = ["PartialGradient", "forget_unsummed"]


class _Waiting(NamedTuple):
    number: int
    parameter: nn.Parameter
    gradient: torch.Tensor


class PartialGradient:
    """Sums the gradient of one parameter over ``communicator``, for `comm.leaves.sum_partial`.

    Made by all ranks in the same order, which is the order within the sum.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._number = communicator.number("partial gradients")

    def __deepcopy__(self, memo: object) -> PartialGradient:
        return self

    def __call__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Deliver the sum at the end of this backward pass; at once when none is under way."""
        communicator = self.communicator
        given = _Waiting(self._number, parameter, gradient)
        task = running_backward()
        if task == -1:
            _sum(communicator, [given])
            return
        waiting = communicator.unsummed.setdefault(task, [])
        waiting.append(given)
        if len(waiting) == 1:

            @apart
            def end_backward() -> None:
                _sum(communicator, communicator.unsummed.pop(task))

            at_end_of_backward(end_backward)


def forget_unsummed(communicator: Communicator) -> None:
    """Drop what a backward pass that raised has left. Called when a forward pass begins."""
    if communicator.unsummed and running_backward() == -1:
        communicator.unsummed.clear()


@torch.no_grad()
def _sum(communicator: Communicator, waiting: Sequence[_Waiting]) -> None:
    """Add up and deliver, in the order in which the parameters were numbered."""
    by_dtype: dict[torch.dtype, list[_Waiting]] = {}
    for given in sorted(waiting, key=lambda given: given.number):
        by_dtype.setdefault(given.gradient.dtype, []).append(given)
    for together in by_dtype.values():
        gradients = [given.gradient for given in together]
        line = torch.cat([gradient.reshape(-1) for gradient in gradients])
        communicator.all_reduce(line, label="partial gradients").wait()
        parts = line.split([gradient.numel() for gradient in gradients])
        for given, part in zip(together, parts, strict=True):
            deliver(given.parameter, part.view(given.gradient.shape))
