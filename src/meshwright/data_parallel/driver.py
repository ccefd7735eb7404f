"""Module hooks and autograd hooks that bring units through one iteration.

::

    before a module's forward    gather its unit, show whole parameters, watch its inputs
    after it                     free the unit, watch its outputs
    gradient of an output        gather the unit again, and the one that ran before it
    gradient of all inputs       take the unit's gradients, start their reduction, free the unit
    end of the backward          reduce what is left, wait, set ``.grad``

The root is the first module of a tree to run forward. Its `Iteration` knows all units below it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.comm import Communicator
from meshwright.data_parallel.unit import Phase, Unit

__all__ = ["Driver", "Iteration", "attach", "driver_of", "tensors_in"]

ATTRIBUTE = "_meshwright_driver"

IN_FLIGHT = 2
"""Reductions that may be under way; the oldest is waited for before another one starts."""


def attach(module: nn.Module, driver: Driver) -> None:
    """Let ``module`` be driven; roots find their units by it."""
    module.__dict__[ATTRIBUTE] = driver


def driver_of(module: nn.Module) -> Driver | None:
    """What drives ``module``; None when nothing does."""
    return module.__dict__.get(ATTRIBUTE)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested sequences, mappings, dataclasses and registered containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for member in fields(value):
            yield from tensors_in(getattr(value, member.name))
    elif value is not None and not isinstance(value, int | float | str):
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


class Iteration:
    """What is shared by all units below one root: their order, and the state of the backward."""

    def __init__(self, root: Driver, module: nn.Module) -> None:
        # The root's driver holds this, so a strong reference back would be a cycle.
        self._root = weakref.ref(root)
        self.drivers: list[Driver] = []
        """Of all units, in registration order; the root first."""
        self.sends_use_counts = True
        """Whether ranks tell each other which parameters had a gradient. Where not, all had one."""
        for name, part in module.named_modules():
            driver = driver_of(part)
            if driver is not None and driver not in self.drivers:
                driver.join(self, name)
                self.drivers.append(driver)
        self.expected: list[Driver] = []
        """The order of the last forward, for gathers ahead of need."""
        self.order: list[Driver] = []
        """Units in the order of this iteration's forward."""
        self.finished: list[Driver] = []
        """Units in the order in which their forward ended."""
        self.in_flight: list[Unit] = []
        self.is_in_backward = False
        self.is_in_forward = False

    # --------------------------------------------------------------------------- forward

    def begin_forward(self) -> None:
        """The root's forward begins; an iteration that raised is given up first."""
        if self.is_in_backward or self.is_in_forward:
            self.reset()
        self.is_in_forward = True
        self.expected = list(self.order) or self.expected
        self.order.clear()

    def end_forward(self) -> None:
        """The root's forward has ended."""
        self.is_in_forward = False

    def record(self, driver: Driver) -> Driver | None:
        """``driver`` runs next; returns the one to gather ahead, if there is one."""
        position = len(self.order)
        self.order.append(driver)
        expected = self.expected
        if position + 1 < len(expected) and expected[position] is driver:
            return expected[position + 1]
        return None

    def reset(self) -> None:
        """Give up an iteration that ended in an exception."""
        for driver in self.drivers:
            driver.drop()
        for kept in (self.order, self.finished, self.in_flight):
            kept.clear()
        self.is_in_backward = self.is_in_forward = False

    # -------------------------------------------------------------------------- backward

    def begin_backward(self) -> None:
        """Ask autograd for a call at the end of this backward pass, once."""
        if not self.is_in_backward:
            self.is_in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def prefetch_before(self, driver: Driver) -> None:
        """Start to gather the unit whose backward comes after that of ``driver``."""
        if not driver.position:
            return
        for other in reversed(self.finished[: driver.position]):
            unit = other.unit
            if unit is not None and unit is not driver.unit:
                if unit.settings.unshard_in_backward:
                    unit.unshard()
                return

    def start_reduction(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit``, with at most so many reductions under way."""
        self.finish_reduction(unit)
        unit.accumulate()
        for other in self.in_flight:
            other.reduce_further()
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.pop(0).finish_reduce()
        unit.reduce()
        self.in_flight.append(unit)

    def finish_reduction(self, unit: Unit) -> None:
        """Wait for the reduction of ``unit`` when one is under way."""
        if unit.is_reducing:
            unit.finish_reduce()
            self.in_flight.remove(unit)

    def end_backward(self) -> None:
        """The backward pass has ended: reduce the rest, wait, set gradients, free everything."""
        for driver in reversed(self.drivers):
            driver.finish_backward(self)
        for unit in self.in_flight:
            unit.finish_reduce()
        self.in_flight.clear()
        self._deliver()
        self.finished.clear()
        self.is_in_backward = False

    def _deliver(self) -> None:
        units = [d.unit for d in self.drivers if d.unit is not None and d.unit.has_mean]
        if not units:
            return
        flags = [flag for unit in units for group in unit.trainable_groups for flag in group.used]
        if self.sends_use_counts:
            flags = _any_rank(flags, units[0].communicators)
        at = 0
        for unit in units:
            used: list[list[bool]] = []
            for group in unit.trainable_groups:
                used.append(flags[at : at + len(group.slots)])
                at += len(group.slots)
            unit.deliver(used)


@torch.no_grad()
def _any_rank(flags: list[bool], communicators: tuple[Communicator, ...]) -> list[bool]:
    """Which of ``flags`` are set on any rank of all ``communicators`` together."""
    mine = torch.tensor(flags, dtype=torch.uint8)
    for axis in communicators:
        everyone = torch.empty(axis.size * len(flags), dtype=torch.uint8, device=axis.device)
        axis.all_gather(everyone, mine.to(axis.device), label="use counts").wait()
        mine = everyone.view(axis.size, -1).amax(0)
    return [bool(flag) for flag in mine.tolist()]


class Driver:
    """Drives one unit (None for modules without parameters of their own) from module hooks."""

    def __init__(self, unit: Unit | None, name: str = "") -> None:
        self.unit = unit
        self.name = name
        self.iteration: Iteration | None = None
        """What the units of one root share; None before the first forward."""
        self.is_root = False
        self.position = -1
        """Where it stands among the units whose forward has ended, at its last forward."""
        self._uses = 0
        """Forwards whose backward has not ended."""
        self._has_run = False

    def join(self, iteration: Iteration, name: str) -> None:
        """Belong to the root of ``iteration``, in which the module is called ``name``."""
        self.iteration = iteration
        self.name = self.name or name

    def start(self, module: nn.Module) -> Iteration:
        """The iteration this belongs to; becomes a root when it belongs to none."""
        if self.iteration is None:
            self.is_root = True
            self.iteration = Iteration(self, module)
        return self.iteration

    # --------------------------------------------------------------------------- forward

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook: whole parameters are there afterwards."""
        iteration = self.start(module)
        unit = self.unit
        is_recompute = torch._C._current_graph_task_id() != -1
        if self.is_root and not is_recompute:
            iteration.begin_forward()
        following: Driver | None = None
        if not is_recompute:
            following = iteration.record(self)
        if unit is None:
            return args, kwargs
        unit.unshard()
        if following is not None and following.unit is not None and unit.settings.forward_prefetch:
            following.unit.unshard()
        unit.wait_unshard()
        if torch.is_grad_enabled():
            if not is_recompute:
                self._uses += 1
                self._has_run = True
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def after_forward(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401
        """The forward hook: the unit is freed, unless it is kept."""
        iteration = self.start(module)
        if torch._C._current_graph_task_id() != -1:
            return output
        is_training = torch.is_grad_enabled()
        if is_training:
            if isinstance(output, torch.Tensor):
                if output.requires_grad:
                    output.register_hook(self.before_backward)
            else:
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(self.before_backward)
            self.position = len(iteration.finished)
            iteration.finished.append(self)
        unit = self.unit
        if unit is not None and not (unit.settings.keep_full_after_forward and is_training):
            unit.reshard()
        if self.is_root:
            iteration.end_forward()
        return output

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Notice when the gradients of all inputs are there: this unit's backward is over then."""
        watched: list[torch.Tensor] = []

        def alias(value: object) -> object:
            if isinstance(value, torch.Tensor):
                if not value.requires_grad:
                    return value
                # A view of its own: the input itself may have uses outside of this module.
                watched.append(value.view_as(value))
                return watched[-1]
            if type(value) in (tuple, list):
                return type(value)(alias(item) for item in value)  # pyrefly: ignore
            if type(value) is dict:
                return {key: alias(item) for key, item in value.items()}
            return value

        args = tuple(alias(value) for value in args)
        if kwargs:
            kwargs = {key: alias(value) for key, value in kwargs.items()}
        if len(watched) == 1:
            watched[0].register_hook(self.after_backward)
        elif watched:
            torch.autograd.graph.register_multi_grad_hook(
                watched, lambda _: self.after_backward(), mode="all"
            )
        return args, kwargs

    # -------------------------------------------------------------------------- backward

    def before_backward(self, gradient: object = None) -> None:
        """The gradient of an output has come: whole parameters are needed again."""
        iteration, unit = self.iteration, self.unit
        if iteration is None:
            return
        iteration.begin_backward()
        if unit is None or unit.phase is Phase.FULL or not unit.settings.unshard_in_backward:
            return
        unit.unshard()
        if unit.settings.backward_prefetch:
            iteration.prefetch_before(self)
        unit.wait_unshard()

    def after_backward(self, gradient: object = None) -> None:
        """The gradients of the inputs have come, so those of the parameters have too."""
        self._uses -= 1
        if self._uses > 0:
            return
        iteration, unit = self.iteration, self.unit
        if iteration is None or unit is None:
            return
        iteration.begin_backward()
        self._end(iteration, unit)

    def finish_backward(self, iteration: Iteration) -> None:
        """The whole backward pass has ended: do what no input's gradient has triggered."""
        unit, has_run = self.unit, self._has_run
        self._uses, self._has_run = 0, False
        if unit is not None and (has_run or unit.has_gradient or unit.phase is not Phase.SHARDED):
            self._end(iteration, unit, is_due=has_run)

    def drop(self) -> None:
        """Give up an iteration that ended in an exception."""
        self._uses, self._has_run = 0, False
        if self.unit is not None:
            self.unit.drop()

    def _end(self, iteration: Iteration, unit: Unit, *, is_due: bool = True) -> None:
        is_due = is_due or unit.has_gradient
        if is_due and unit.settings.synchronise and unit.trainable_groups:
            iteration.start_reduction(unit)
        self._has_run = False
        if not unit.settings.keep_full_after_backward:
            unit.reshard()
