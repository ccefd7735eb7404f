"""Looks, at the start of each step, for changes of a model that its stages do not follow.

A pipeline calls the stages of a model and not the modules that it took apart, and a backward has
the gradient of one microbatch on one rank. So a hook on such a module would never run, a hook of a
parameter would see a part of its gradient, and a tensor that was assigned to such a module would
not be used. Each raises on this rank, and the schedule tells the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_after_hooks
from meshwright.composition.pipelines.stages import CutModel
from meshwright.errors import LayoutError
from meshwright.torch_internals.autograd import after_hooks_of, backward_hooks_of
from meshwright.torch_internals.modules import HOOKS, STEPPERS


class CutGuard:
    """The modules and parameters of a model as they were when its stages were laid out."""

    def __init__(
        self, model: nn.Module, found: CutModel, mine: Sequence[nn.Module], *, is_sharded: bool
    ) -> None:
        """``mine`` are the stages of this rank; ``is_sharded``: units replace their parameters."""
        kept = {part for stage in found.modules for part in stage.modules()}
        apart = [(name, part) for name, part in model.named_modules() if part not in kept]
        self._hooks = [
            (getattr(part, kind), len(getattr(part, kind)), f"{what} on {_called(name, part)}")
            for name, part in apart
            for kind, what in HOOKS.items()
        ]
        self._modes = [
            (part, part.training, _called(name, part))
            for name, part in apart
            if found.info is not None
        ]
        """Stages of a graph have a mode of their own; those of a chain are the model's modules."""
        own = {id(table) for part in kept for table in (part._parameters, part._buffers)}
        tables = [
            (name, table)
            for name, part in apart
            for table in (part._parameters, part._buffers)
            if id(table) not in own  # else what is assigned reaches the stage
        ]
        if not is_sharded:
            tables += [(n, p._parameters) for each in mine for n, p in each.named_modules()]
        self._tensors = [
            (table, key, tensor, f"{name}.{key}".lstrip("."))
            for name, table in tables
            for key, tensor in table.items()
        ]
        self._parameters = [
            (parameter, len(after_hooks_of(parameter) or ()), name)
            for stage in mine
            for name, parameter in stage.named_parameters()
        ]
        """Each with the number of its hooks, which are those of a reducer."""

    def check(self) -> None:
        """Raise LayoutError for a hook, a tensor or a mode that the stages would not follow."""
        for hooks, count, what in self._hooks:
            if len(hooks) > count:
                raise LayoutError(
                    f"a {what}, which no stage calls, would never run: put it on a "
                    "module in one of `Trainable.entries`, the stages of this rank"
                )
        for part, mode, name in self._modes:
            if part.training is not mode:
                raise LayoutError(
                    f"the mode of {name} was changed, which was traced into stages with a mode of "
                    "their own: call train() of `Trainable.module`. `Trainable.eval` needs neither"
                )
        for table, key, tensor, name in self._tensors:
            if table.get(key, tensor) is not tensor:
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise LayoutError(
                    f"{what} {name!r} was given anew after parallelize (by assignment, or "
                    "load_state_dict(assign=True)), and the stages, the optimizer and the "
                    "reductions know the former: write the values into that (copy_), load them by "
                    "Trainable.load_state_dict, or do it before"
                )
        for parameter, count, name in self._parameters:
            after = after_hooks_of(parameter)
            is_hooked = backward_hooks_of(parameter) or (after and len(after) > count)
            if is_hooked or STEPPERS in vars(parameter):
                raise LayoutError(hooked(name))


def hooked(name: str) -> str:
    """The text of the error for hooks on a parameter's gradient."""
    return (
        f"parameter {name!r} has a hook on its gradient, or an optimizer that steps in the "
        "backward. A backward under axis pipeline has the gradient of one microbatch on one rank, "
        "which the hook would take for the whole: remove it, and change the gradients of "
        "`Trainable.named_parameters` between forward_backward and optimizer_step, or clip them by "
        "[train] clip_norm"
    )


def hooked_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """List the names of parameters that have hooks on their gradients."""
    return [name for name, p in named if backward_hooks_of(p) or has_after_hooks(p)]


def _called(name: str, part: nn.Module) -> str:
    return f"module {name or type(part).__name__!r}"
