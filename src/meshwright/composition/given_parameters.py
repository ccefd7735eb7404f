"""The user's parameters as `parallelize` got them, and what users expect of them afterwards.

Layouts replace them: by values for the meta device, by DTensors for shards. The replacements get
the user's attributes and hooks, and an optimizer that was built before is checked.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.composition.laying_out import optimized_parameters
from meshwright.composition.pipelines.own_tensors import is_elsewhere
from meshwright.errors import PlanError
from meshwright.gradients import check_optimizer
from meshwright.plan import Plan
from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    set_after_hooks,
    set_backward_hooks,
)


@dataclass(frozen=True, slots=True)
class _Given:
    """One parameter as it was; a weak reference does not keep its memory."""

    name: str
    itself: weakref.ref[nn.Parameter]
    attributes: Mapping[str, Any]
    """Attributes that users have set."""
    hooks: Any
    """Hooks of `Tensor.register_hook`, in the dict that their handles refer to, or None."""
    later_hooks: Any
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, likewise."""


class GivenParameters:
    """The parameters of one model before anything is laid out."""

    def __init__(self, model: nn.Module) -> None:
        self._given = {
            name: _Given(
                name,
                weakref.ref(parameter),
                dict(vars(parameter)),
                backward_hooks_of(parameter) or None,
                after_hooks_of(parameter) or None,
            )
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def carry(self, module: nn.Module) -> None:
        """Copy attributes and hooks to parameters of ``module`` from those that they replace."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            before = self._given.get(name)
            if before is None or before.itself() is parameter:
                continue
            for key, value in before.attributes.items():
                vars(parameter).setdefault(key, value)
            if before.hooks and not backward_hooks_of(parameter):
                set_backward_hooks(parameter, before.hooks)
            if before.later_hooks and not after_hooks_of(parameter):
                set_after_hooks(parameter, before.later_hooks)

    def optimizer(
        self,
        make: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
        module: nn.Module,
        plan: Plan,
        copies: contextlib.AbstractContextManager[object],
    ) -> Optimizer | None:
        """Call ``make`` with this rank's parameters; it may return an existing optimizer.

        Inside of ``copies`` each stage holds its own copy of a tied parameter.

        Parameters of other stages are removed from it. Raises PlanError for an optimizer of
        replaced parameters, whose steps would have no effect, TypeError for one that may lack this
        rank's parameters.
        """
        if make is None:
            return None
        # torch rejects an empty list, but the groups must be those of the other ranks.
        nothing = nn.Parameter(torch.empty(0, device="cpu"))
        optimizer = make([*optimized_parameters(module, plan, copies)] or [nothing])
        check_optimizer(optimizer, has_closure=False)
        groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
        held = {id(parameter) for parameter in module.parameters()}
        given = {
            id(found): g.name for g in self._given.values() if (found := g.itself()) is not None
        }
        lost = [
            given[id(parameter)]
            for group in groups
            for parameter in group["params"]
            if id(parameter) in given.keys() - held and not is_elsewhere(parameter)
        ]
        if lost:
            raise PlanError(
                f"{len(lost)} parameters of the {type(optimizer).__name__}, {lost[0]!r} first, are "
                "what the model had before it was laid out, and others train in their place: build "
                "the optimizer from the parameters that its function is given"
            )
        for group in groups:
            kept: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter is nothing or is_elsewhere(parameter):
                    optimizer.state.pop(parameter, None)
                else:
                    kept.append(parameter)
            group["params"] = kept
        return optimizer
