"""Values that one stage has received, by microbatch, and the gradients sent back for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.pipelining.messages.metadata import Values

Gradients = list[torch.Tensor | None]
"""The gradient of each leaf of a stage's outputs."""


@dataclass(slots=True)
class _Microbatch:
    """Values that have arrived for one microbatch and are not used yet."""

    outputs: dict[int, Values] = field(default_factory=dict)
    """By source stage."""
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """By target stage."""


class Inbox:
    """Values of one stage between their arrival and their use.

    ::

        put_outputs   -> read  -> forward  -> backward -> keep_gradients -> take_gradients
        put_gradients -> added                -> backward
    """

    def __init__(self) -> None:
        self._come: dict[int, _Microbatch] = {}
        self._reads: dict[int, dict[int, list[Any]]] = {}
        self._gradients: dict[int, dict[int, Gradients]] = {}

    def clear(self) -> None:
        self._come.clear()
        self._reads.clear()
        self._gradients.clear()

    def put_outputs(self, microbatch: int, source: int, values: Values) -> None:
        """Store outputs that stage ``source`` has sent."""
        self._of(microbatch).outputs[source] = values

    def put_gradients(self, microbatch: int, target: int, gradients: Gradients) -> None:
        """Store the gradients of this stage's outputs that stage ``target`` has sent, by leaf."""
        self._of(microbatch).gradients[target] = gradients

    def read(self, microbatch: int, *, has_backward: bool) -> dict[int, tuple[Any, ...]]:
        """Take all outputs that have arrived, by source stage, as leaves of this stage's graph."""
        come = self._of(microbatch).outputs
        nested: dict[int, tuple[Any, ...]] = {}
        reads: dict[int, list[Any]] = {}
        for source, values in come.items():
            fresh = [_fresh(leaf, has_backward) for leaf in values.leaves]
            reads[source] = fresh
            nested[source] = values.nested_as(fresh)
        come.clear()
        if has_backward:
            self._reads[microbatch] = reads
        return nested

    def leaves(self, microbatch: int) -> list[Any]:
        """List the leaves that a microbatch's forward has read; a backward sets their ``.grad``."""
        return [leaf for leaves in self._reads.get(microbatch, {}).values() for leaf in leaves]

    def added(self, microbatch: int, count: int) -> Gradients | None:
        """Sum and remove the gradients of ``count`` outputs, in the order of the sending stages.

        The result does not depend on the order of arrival. None: none has arrived.
        """
        arrived = self._of(microbatch).gradients
        if len(arrived) == 1:
            return arrived.popitem()[1]
        if not arrived:
            return None
        total: Gradients = [None] * count
        for target in sorted(arrived):
            for number, gradient in enumerate(arrived[target]):
                if gradient is not None:
                    before = total[number]
                    total[number] = gradient if before is None else before + gradient
        arrived.clear()
        return total

    def keep_gradients(self, microbatch: int) -> None:
        """Move the gradients of what was read out of ``.grad``, for `take_gradients`."""
        found: dict[int, Gradients] = {}
        for source, leaves in self._reads.pop(microbatch, {}).items():
            taken: Gradients = []
            for leaf in leaves:
                gradient = leaf.grad if isinstance(leaf, torch.Tensor) else None
                if gradient is not None:
                    leaf.grad = None
                taken.append(gradient)
            found[source] = taken
        self._gradients[microbatch] = found

    def has_gradients(self, microbatch: int) -> bool:
        """Whether the backward of a microbatch has run."""
        return microbatch in self._gradients

    def take_gradients(self, microbatch: int, source: int) -> Gradients:
        """Return the gradients that go to stage ``source``, after the backward."""
        return self._gradients[microbatch][source]

    def _of(self, microbatch: int) -> _Microbatch:
        found = self._come.get(microbatch)
        if found is None:
            found = self._come[microbatch] = _Microbatch()
        return found


def _fresh(leaf: object, has_backward: bool) -> object:
    """Detach another stage's output: its gradient ends here and is sent back."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = leaf.detach()
    if has_backward and leaf.requires_grad:
        fresh.requires_grad_()
    return fresh
