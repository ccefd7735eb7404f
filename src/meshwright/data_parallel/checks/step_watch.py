"""Counts the optimizer steps over some parameters on this rank, and the steps that raised.

Tensor versions alone cannot tell: a step that raised may have changed half of the weights, and an
optimizer without parameters on this rank changes none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshwright.comm import settle
from meshwright.comm.graphs.untraced import apart
from meshwright.comm.streams import is_host

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of how a step is computed, which may differ where its result does not."""


class Steps(Enum):
    """What optimizers did since the last `take`."""

    NONE = "none"
    ENDED = "ended"
    RAISED = "raised"


class StepWatch:
    """Counts the steps of all optimizers that hold one of ``parameters()``.

    Optimizers that are not `torch.optim.Optimizer` are not seen.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        given: Callable[[], Iterable[torch.Tensor]] = tuple,
        check: Callable[[torch.optim.Optimizer], object] | None = None,
        *,
        with_settings: bool = False,
    ) -> None:
        """``given`` are the original objects of parameters that were replaced.

        ``check`` is called with the optimizer before each step, and raises where a step is not
        allowed. `settings` are recorded ``with_settings`` only.
        """
        self._with_settings = with_settings
        self._check = check
        self._parameters = parameters
        self._given = given
        self._begun = 0
        self._ended = 0
        self.has_closure = False
        """True when the step that is checked computes the loss itself."""
        self.has_seen = False
        """True once one of them has stepped: who else changes weights need not be looked for."""
        self.was_fused = self._is_fused = False
        """True when one of those that the last call of `take` returned has changed no version."""
        self.settings: tuple[str, ...] = ()
        """The settings of the steps that the last call of `take` returned, by group."""
        self._noted: list[str] = []
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._words: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[list[list[tuple[str, object]]], list[str]]
        ] = weakref.WeakKeyDictionary()
        for register, method in (
            (register_optimizer_step_pre_hook, self._begins),
            (register_optimizer_step_post_hook, self._ends),
        ):
            handle = register(_Hook(weakref.WeakMethod(method)))
            hooks = handle.hooks_dict_ref() or {}
            # Not when a watch goes, which the garbage collector may let happen inside a step.
            for key in [k for k, hook in hooks.items() if isinstance(hook, _Hook) and hook.is_idle]:
                del hooks[key]

    def ask(self, check: Callable[[torch.optim.Optimizer], object] | None) -> None:
        """Call ``check`` before each step from now on; None removes the check."""
        self._check = check

    def take(self) -> Steps:
        """Return the steps since the last call. An unfinished step counts as one that raised."""
        begun, ended = self._begun, self._ended
        self._begun = self._ended = 0
        self.was_fused, self._is_fused = self._is_fused, False
        self.settings = tuple(self._noted)
        self._noted.clear()
        self.has_seen = self.has_seen or bool(begun or ended)
        if begun > ended:
            return Steps.RAISED
        return Steps.ENDED if ended else Steps.NONE

    # --------------------------------------------------------------------------- private

    def _begins(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self.has_closure = has_closure
        if self._holds(optimizer):
            if self._check is not None:
                self._check(optimizer)
            self._begun += 1

    def _ends(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if self._holds(optimizer):
            self._ended += 1
            self._is_fused = self._is_fused or bool(optimizer.defaults.get("fused"))
            if self._with_settings:
                self._noted += self._settings(optimizer)

    def _settings(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Describe the settings of each parameter group of ``optimizer``, without duplicates."""
        numbers = [_numbers(optimizer, group) for group in optimizer.param_groups]
        before = self._words.get(optimizer)
        if before is not None and before[0] == numbers:
            return before[1]
        kind = type(optimizer).__name__
        words = [
            f"{kind} with {', '.join(f'{key}={value}' for key, value in each)}" for each in numbers
        ]
        words = [*dict.fromkeys(words)]
        self._words[optimizer] = numbers, words
        return words

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        size = sum(len(group["params"]) for group in groups)
        known = self._known.get(optimizer)
        if known is None or known[0] != size:
            mine = {id(parameter) for parameter in self._parameters()}
            held = {id(p) for group in groups for p in group["params"]}
            known = size, bool(held & mine)
            left_behind = held & {id(parameter) for parameter in self._given()} - mine
            if left_behind:
                raise RuntimeError(
                    f"{len(left_behind)} parameters of a {type(optimizer).__name__} are what the "
                    "module had before it was sharded, or has while it holds whole parameters: a "
                    "step would change nothing. Build the optimizer from the parameters of the "
                    "sharded module, before its first forward or after a backward"
                )
            if known[1] and optimizer not in self._known:
                optimizer.register_state_dict_pre_hook(settle)
            self._known[optimizer] = known
        return known[1]


def _numbers(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[tuple[str, object]]:
    """List the numbers that a step of ``group`` uses, except values in tensors on a device.

    Other entries of a group, such as a gradient norm that a user has stored, are no settings.
    """
    found: list[tuple[str, object]] = []
    for key, value in group.items():
        if key in _HOW or (key != "lr" and key not in optimizer.defaults):
            continue
        if isinstance(value, float | int):
            found.append((key, value))
            continue
        has_several = type(value) in (tuple, list)
        several: Sequence[object] = value if has_several else (value,)
        numbers = [_number(e) if isinstance(e, torch.Tensor) else e for e in several]
        if all(isinstance(each, float | int) for each in numbers):
            found.append((key, tuple(numbers) if has_several else numbers[0]))
    return found


def _number(value: torch.Tensor) -> float | None:
    """Read ``value``, one number on the host, unless a compiler is tracing; None otherwise."""
    if value.numel() != 1 or not is_host(value.device) or torch.compiler.is_compiling():
        return None
    return value.item()


class _Hook:
    """A process-wide hook on all optimizers that does not keep its watch alive."""

    def __init__(self, method: weakref.WeakMethod[Any]) -> None:
        self._method = method

    @property
    def is_idle(self) -> bool:
        """True when its watch is gone."""
        return self._method() is None

    @apart
    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call = self._method()
        if call is not None:
            call(optimizer, len(args) > 1 or bool(kwargs))
