"""The backward of a stage in one piece or in two, and what lies between the two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.pipelining.stepping.backward import (
    Junction,
    run_backward,
    stage_backward_input,
    stage_backward_weight,
)

DwRunner = Callable[[], object]
"""Computes the gradients of weights, for the user."""
DwBuilder = Callable[[], DwRunner]
Outputs = list[object]
Gradients = list[torch.Tensor | None] | None


@dataclass(slots=True)
class _Halfway:
    """A microbatch between the two halves of its backward."""

    junctions: list[Junction] | None = None
    runner: DwRunner | None = None
    whole: tuple[Outputs, Gradients] | None = None
    """Outputs and gradients of a stage that reads from no other, whose first half is empty."""


class Halves:
    """Runs backwards, and keeps the microbatches whose second half is yet to come."""

    def __init__(self) -> None:
        self._kept: dict[int, _Halfway] = {}

    def __contains__(self, microbatch: int) -> bool:
        """Check that the second half is yet to come."""
        return microbatch in self._kept

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def whole(self, outputs: Outputs, gradients: Gradients, builder: DwBuilder | None) -> None:
        """The whole backward; what ``builder`` gives is run right behind it."""
        run_backward(outputs, gradients)
        if builder is not None:
            builder()()

    def first(
        self,
        microbatch: int,
        outputs: Outputs,
        gradients: Gradients,
        inputs: Sequence[object] | None,
        builder: DwBuilder | None,
    ) -> None:
        """The input half. ``inputs`` None: there is nothing to compute gradients for.

        With a ``builder`` that is all that autograd does, and what it gives is the second half.
        """
        if builder is not None:
            run_backward(outputs, gradients)
            self._kept[microbatch] = _Halfway(runner=builder())
        elif inputs is None:
            self._kept[microbatch] = _Halfway(whole=(outputs, gradients))
        else:
            _, junctions = stage_backward_input(outputs, gradients, inputs, None)
            self._kept[microbatch] = _Halfway(junctions=junctions)

    def second(self, microbatch: int) -> None:
        """The weight half."""
        half = self._kept.pop(microbatch)
        if half.runner is not None:
            half.runner()
        elif half.whole is not None:
            outputs, gradients = half.whole
            run_backward(outputs, gradients)
        elif half.junctions is not None:
            stage_backward_weight((), half.junctions)
