"""Backward passes that no output of a unit announces: no output of its forward was found.

Outputs are found in containers, dataclasses and classes that are registered with torch, but not in
objects of other classes, closures and generators. A unit without outputs stays unsharded until
the backward has ended, which begins at the latest with the first gradient of a parameter. Where
some outputs are found, hidden ones are not expected beside them; they train where the unit is
gathered in time. Where it is not, torch rejects the read of saved parameters (see `Unit`); a
backward through hidden outputs alone raises.
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
    """Return the root's ``output`` with views in place of what a freed unit has returned.

    The gradient of a view comes before all that the unit has computed, and calls its hook, too.
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
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def refusal(name: str) -> RuntimeError:
    """The error for a forward of module ``name`` whose derivatives reach no hook."""
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
    """The error for a gradient of parameter ``name`` that no hook of ``unit`` announced."""
    return RuntimeError(
        f"rank {rank_in(unit.communicators)}: a backward pass has given sharded parameter {name!r} "
        f"a gradient and went through no output of unit {unit.name!r}: nothing has reduced it, and "
        f"it is dropped. {_RETURN}"
    )


def expect(
    unit: Unit | None, iteration: Iteration, output: object, *, is_inner: bool
) -> Hooks | None:
    """Hook the parameters of ``unit`` to notice its backward; None where none will come.

    ``is_inner`` says that its inputs get gradients. With nothing to train, tensors hidden in its
    ``output`` may still need a backward.
    """
    slots = () if unit is None else unit.slots
    leaves = [slot.leaf for slot in slots if slot.leaf.requires_grad]
    may_come = leaves or is_inner or not all(isinstance(v, PLAIN) for v in tree_leaves(output))
    return Hooks(leaves, iteration) if may_come else None
