"""Hooks that run once ``.grad`` of a parameter is set, where autograd fills another tensor.

Autograd never accumulates into a parameter that is sharded, or that computes as a local leaf. So
hooks of `register_post_accumulate_grad_hook` are called here, and optimizers that torch's
``_apply_optimizer_in_backward`` has attached to the parameter are stepped here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    set_after_hooks,
)
from meshwright.torch_internals.modules import STEPPERS, hooks_of_steppers

_CARRIED = "_meshwright_in_backward"
_ELSEWHERE = "_meshwright_gradient_elsewhere"

Hook = Callable[[Any], Any]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook, or an optimizer in the backward, waits for the gradient of ``tensor``."""
    return bool(backward_hooks_of(tensor) or after_hooks_of(tensor) or STEPPERS in tensor.__dict__)


def is_stepped(parameter: torch.Tensor) -> bool:
    """Whether torch has attached an optimizer to ``parameter`` that steps in the backward."""
    return STEPPERS in parameter.__dict__


def run_after_hooks(parameter: torch.Tensor) -> None:
    """Run the hooks of ``parameter`` after its ``.grad`` was set."""
    for hook in hooks_in(after_hooks_of(parameter)):
        hook(parameter)
    step_in_backward(parameter)


class _Deferred:
    """A hook that autograd skips while the parameter's gradient is elsewhere."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, given: torch.Tensor | None) -> torch.Tensor | None:
        is_elsewhere = given is None or vars(given).get(_ELSEWHERE, False)
        return None if is_elsewhere else self.hook(given)


class Own(_Deferred):
    """A hook of the library's own: it runs where autograd calls it, and nowhere else."""

    def __call__(self, given: torch.Tensor) -> None:
        self.hook(given)


def defer_hooks(parameter: nn.Parameter, *, is_elsewhere: bool) -> None:
    """Skip autograd's calls of ``parameter``'s hooks while its gradient ``is_elsewhere``."""
    vars(parameter)[_ELSEWHERE] = is_elsewhere
    for hooks in (backward_hooks_of(parameter), after_hooks_of(parameter)):
        for key, hook in (hooks or {}).items():
            hooks[key] = hook if isinstance(hook, _Deferred) else _Deferred(hook)
    if is_elsewhere and STEPPERS in parameter.__dict__:
        take_over_steps([parameter])


def hooks_in(hooks: Mapping[int, Hook] | None) -> list[Hook]:
    """List ``hooks`` of a tensor as they were registered, without the library's own."""
    found = (hook for hook in (hooks or {}).values() if not isinstance(hook, Own))
    return [hook.hook if isinstance(hook, _Deferred) else hook for hook in found]


def take_over_steps(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Take over the steps that torch's hooks make in the backward; returns their parameters."""
    hooks = hooks_of_steppers()
    found = tuple(filter(_stepping, parameters))
    for parameter in found:
        for handle in hooks.pop(parameter, ()):
            handle.remove()
        parameter.__dict__[_CARRIED] = True
    return found


def step_in_backward(parameter: torch.Tensor) -> None:
    """Run the optimizers that step ``parameter`` in the backward, if any, and free ``.grad``."""
    if STEPPERS in parameter.__dict__ and (optimizers := _stepping(parameter)):
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None


def carry_after_hooks(source: torch.Tensor, target: nn.Parameter, name: str) -> None:
    """Give ``target``, which replaces ``source``, all hooks that wait for its gradient.

    Handles remove hooks of both. Raises ValueError for an optimizer that has state for ``source``.
    """
    if after_hooks_of(source):
        set_after_hooks(target, after_hooks_of(source))
    hooks_of_steppers()  # raises where they have another name
    if STEPPERS not in source.__dict__:
        return
    target.__dict__[STEPPERS] = source.__dict__[STEPPERS]
    for optimizer in _stepping(source):
        if optimizer.state:
            raise ValueError(
                f"the {type(optimizer).__name__} that steps {name!r} in the backward has state of "
                "the whole parameter: apply it to the parameters of the sharded module"
            )
        for group in optimizer.param_groups:
            group["params"] = [target if each is source else each for each in group["params"]]
        target.__dict__[_CARRIED] = True


def _stepping(parameter: torch.Tensor) -> Sequence[Optimizer]:
    """List the optimizers that step it in the backward; none if torch's hook was declined."""
    if STEPPERS not in parameter.__dict__:
        return ()
    is_hooked = parameter.__dict__.get(_CARRIED, False) or parameter in hooks_of_steppers()
    return parameter.__dict__[STEPPERS] if is_hooked else ()
