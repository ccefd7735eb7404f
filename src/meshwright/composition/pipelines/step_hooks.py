"""The user's hooks on parameters of a pipeline run once a step, on the step's gradient.

The gradient of a microbatch is only that of a few samples on one rank, and not divided by the count
yet. So hooks are disabled while the schedule runs, and then get what one process would give them:
the gradient of the global batch, summed over microbatches and data ranks and scaled, before it is
clipped. Each replica runs them, so their effect must depend on the gradient alone.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import is_dtensor, local_of
from meshwright.data_parallel.replicas.reducer import GradientReducer
from meshwright.errors import LayoutError
from meshwright.torch_internals.autograd import (
    after_hooks_of,
    backward_hooks_of,
    set_after_hooks,
    set_backward_hooks,
)

Hooks = dict[int, Callable[..., Any]]


class Rested(NamedTuple):
    """The disabled hooks of one parameter's gradient."""

    parameter: nn.Parameter
    changing: Hooks
    """Hooks of `Tensor.register_hook`, by the ``id`` of their handle."""
    following: Hooks
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, except a reducer's."""
    before: tuple[Hooks, Hooks]
    """The dicts that handles refer to, to be put back."""


@contextlib.contextmanager
def resting(parameters: Iterable[nn.Parameter]) -> Iterator[list[Rested]]:
    """Disable hooks of ``parameters`` in the block, except a reducer's; yields those disabled."""
    rested: list[Rested] = []
    for parameter in parameters:
        if not backward_hooks_of(parameter) and not after_hooks_of(parameter):
            continue
        changing = _hooks(backward_hooks_of(parameter))
        following = _hooks(after_hooks_of(parameter))
        theirs = {n: hook for n, hook in following.items() if not _is_ours(hook)}
        if changing or theirs:
            rested.append(Rested(parameter, dict(changing), theirs, (changing, following)))
            set_backward_hooks(parameter, None)
            # Setting None would leave hooks that autograd has cached.
            ours = OrderedDict((n, hook) for n, hook in following.items() if n not in theirs)
            set_after_hooks(parameter, ours)
    try:
        yield rested
    finally:
        for parameter, _, _, (changing, following) in rested:
            set_backward_hooks(parameter, changing)
            following.update(_hooks(after_hooks_of(parameter)))
            set_after_hooks(parameter, following)


class StepHooks:
    """The hooks of the parameters of one rank's stages."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], fixed: Iterable[nn.Module]
    ) -> None:
        """``fixed`` are modules whose parameters must stay the same objects.

        Stages that share a parameter each have an entry in ``named``.
        """
        pairs = list(named)
        self._parameters = tuple(parameter for _, parameter in pairs)
        self._names = {id(parameter): name for name, parameter in pairs}
        self._places: list[tuple[Mapping[str, object], str, nn.Parameter]] = [
            (part._parameters, key, parameter)
            for module in fixed
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None and id(parameter) in self._names
        ]
        self._rested: list[Rested] = []
        """The disabled hooks of the last pass."""

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Disable all hooks in the block.

        Raises LayoutError for a parameter that was replaced in its module.
        """
        for table, key, parameter in self._places:
            if table.get(key, parameter) is not parameter:
                raise LayoutError(
                    f"parameter {self._names[id(parameter)]!r} was given anew after parallelize "
                    "(by assignment, or load_state_dict(assign=True)), and the optimizer and the "
                    "reductions know the former: write the values into that (copy_), load them by "
                    "Trainable.load_state_dict, or do it before"
                )
        with resting(self._parameters) as self._rested:
            yield

    @torch.no_grad()
    def run(self) -> bool:
        """Run the disabled hooks on the gradients in ``.grad`` now; returns whether there were any.

        Raises what they raise, with the name of the parameter; RuntimeError for a gradient of
        another kind or shape.
        """
        rested, self._rested = self._rested, list[Rested]()
        for parameter, changing, following, _ in reversed(rested):
            if parameter.grad is None:
                continue
            try:
                for hook in changing.values():
                    _write(parameter.grad, hook(parameter.grad))
                for hook in following.values():
                    hook(parameter)
            except Exception as error:
                error.add_note(
                    f"This was a hook of parameter {self._names[id(parameter)]!r}: in a pipeline "
                    "it runs once a step, on the gradient of the global batch."
                )
                raise
        return bool(rested)


def _hooks(found: Hooks | None) -> Hooks:
    """Return the dict that handles refer to, or an empty one."""
    return OrderedDict[int, Any]() if found is None else found


def _is_ours(hook: object) -> bool:
    """Whether ``hook`` is a reducer's."""
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return isinstance(owner, GradientReducer)


def _write(gradient: torch.Tensor, changed: torch.Tensor | None) -> None:
    """Write the result of a hook into ``gradient``."""
    if changed is None or changed is gradient:
        return
    if is_dtensor(changed) is not is_dtensor(gradient) or changed.shape != gradient.shape:
        raise RuntimeError(
            f"expected a hook to return a gradient like the {type(gradient).__name__} of shape "
            f"{tuple(gradient.shape)} that it is given, found a {type(changed).__name__} of shape "
            f"{tuple(changed.shape)}"
        )
    local_of(gradient).copy_(local_of(changed))
