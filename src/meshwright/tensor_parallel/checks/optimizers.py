"""A look at what optimizers hold, before their steps.

Of those that were built before their parameters became DTensors a step would change nothing.
Parameters that have become DTensors say so themselves. Each optimizer is looked at in its first
step, and when it has got more parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.comm import Communicator
from meshwright.gradients import look_at_optimizers

__all__ = ["watch_optimizers"]

_KEPT = "optimizers"


def watch_optimizers(
    axis: Communicator,
    became: Callable[[torch.Tensor], str],
    steps: Callable[[torch.optim.Optimizer], None],
) -> None:
    """Refuse steps of optimizers that hold what has become a DTensor, and tell ``steps`` of others.

    ``became`` is the name of what a parameter has become, "" for any other. The watch lasts as
    long as ``axis``.
    """
    look_at_optimizers()
    if _KEPT not in axis.kept:
        axis.kept[_KEPT] = _Watch(became, steps)


class _Watch:
    def __init__(
        self,
        became: Callable[[torch.Tensor], str],
        steps: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._became = became
        self.steps = steps
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        handle = register_optimizer_step_pre_hook(_Hook(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError where a step would leave the module's parameters as they are."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._seen.get(optimizer) == size:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for name in map(self._became, held) if name]
        if names:
            raise RuntimeError(
                f"{len(names)} parameters of a {type(optimizer).__name__}, {names[0]} first, are "
                "what the module had before parallelize_module made DTensors of them: a step "
                "would change nothing. Build the optimizer after parallelize_module"
            )
        self._seen[optimizer] = size


class _Hook:
    """A hook of the process on all optimizers, which does not keep its watch alive."""

    def __init__(self, watch: weakref.ref[_Watch]) -> None:
        self._watch = watch

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        watch = self._watch()
        if watch is not None and not torch.compiler.is_compiling():
            watch.look(optimizer)
            watch.steps(optimizer)
