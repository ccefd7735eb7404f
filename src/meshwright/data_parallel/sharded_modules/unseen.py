"""Backward passes that no output of a unit tells of: its forward has returned none that is found.

Outputs are looked for in containers, dataclasses and what is registered with torch. In an object of
any other class, a closure or a generator they are not. Such a unit stays whole until the backward
has ended, which begins at the latest with the first gradient of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.data_parallel.sharded_modules.iteration import Iteration
from meshwright.data_parallel.shards.unit import Unit
from meshwright.torch_internals.autograd import function_transforms
from meshwright.torch_internals.trees import tree_leaves

PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))


class Hooks:
    """Begins the backward of ``iteration`` at gradients of ``leaves``, until told to stop."""

    def __init__(self, leaves: Sequence[torch.Tensor], iteration: Iteration) -> None:
        self._iteration = iteration
        self._hooks = [leaf.register_post_accumulate_grad_hook(self._arrived) for leaf in leaves]

    def _arrived(self, leaf: torch.Tensor) -> None:
        self._iteration.begin_backward()

    def stop(self) -> None:
        """Begin nothing more."""
        for hook in self._hooks:
            hook.remove()


def refusal(name: str) -> RuntimeError:
    """Find the refusal of a forward of module ``name`` whose derivatives no hook tells of."""
    transform = "a transform of torch.func (vmap, grad, ...)"
    if function_transforms() is None:
        transform = "forward-mode differentiation (torch.autograd.forward_ad) with gradients"
    return RuntimeError(
        f"{name} is sharded and was called inside of {transform}, which hides when its backward "
        "comes. Call it outside, or use replicate"
    )


def expect(
    unit: Unit | None, iteration: Iteration, output: object, *, is_inner: bool
) -> Hooks | None:
    """Notice when the backward of ``unit`` comes; None where none will.

    ``is_inner`` tells that its inputs get gradients. Those of a unit without anything to train may
    be hidden as those of its ``output`` are.
    """
    slots = () if unit is None else unit.slots
    leaves = [slot.leaf for slot in slots if slot.leaf.requires_grad]
    may_come = leaves or is_inner or not all(isinstance(v, PLAIN) for v in tree_leaves(output))
    return Hooks(leaves, iteration) if may_come else None
