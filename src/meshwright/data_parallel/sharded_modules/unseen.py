"""Backward passes that no output of a unit tells of: its forward has returned none that is found.

Outputs are looked for in containers, dataclasses and what is registered with torch. In an object of
any other class, a closure or a generator they are not. Such a unit stays whole until the backward
has ended, which begins at the latest with the first gradient of a parameter. Beside outputs that
are found, others are not expected. A unit is there before its output's gradient comes, so that
they train. Where one was not, torch refuses to read what was saved of its parameters (see
`Unit`); where a backward has gone through these alone, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshwright.data_parallel.modules.nested import cloned
from meshwright.data_parallel.shards.replaced_parameters import rank_in
from meshwright.data_parallel.shards.unit import Phase, Unit
from meshwright.torch_internals.autograd import backward_hooks_of, function_transforms
from meshwright.torch_internals.trees import tree_leaves

if TYPE_CHECKING:
    from meshwright.data_parallel.sharded_modules.iteration import Iteration

PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))


def with_own_node(output: Any, tell: Callable[..., None]) -> Any:  # noqa: ANN401
    """Give the root's ``output`` as views, where a unit that was freed has returned the same.

    The gradient of a view comes before all that the unit has computed, and tells the unit, too.
    ``tell`` is the method of drivers that hooks of outputs call.
    """

    views: dict[int, torch.Tensor] = {}

    def is_freed(tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:  # of which there are no views
            return False
        for hook in (backward_hooks_of(tensor) or {}).values():
            unit = hook.__self__.unit if getattr(hook, "__func__", None) is tell else None
            if unit is not None and unit.phase is not Phase.FULL:
                return True
        return False

    def view(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in views:  # one object stays one
            return views[id(tensor)]
        views[id(tensor)] = other = tensor.view_as(tensor)
        other.__dict__.update(tensor.__dict__)  # a mask, say, that a program has hung on it
        for hook in (backward_hooks_of(tensor) or {}).values():
            if getattr(hook, "__func__", None) is tell:
                other.register_hook(hook)
        return other

    return cloned(output, where=is_freed, clone=view)


class Hooks:
    """Hooks on ``leaves``, whose first gradient begins the backward of ``iteration``."""

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


_RETURN = (
    "A loss that a forward leaves in a closure, a global variable or an object of a class of its "
    "own is not seen beside its output: return it, or keep it in an attribute of the module or in "
    "a list there"
)


def lost(name: str, unit: Unit) -> RuntimeError:
    """Find the error for a gradient of parameter ``name`` that ``unit`` has never been told of."""
    return RuntimeError(
        f"rank {rank_in(unit.communicators)}: a backward pass has given sharded parameter {name!r} "
        f"a gradient and went through no output of unit {unit.name!r}: nothing has reduced it, and "
        f"it is dropped. {_RETURN}"
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
