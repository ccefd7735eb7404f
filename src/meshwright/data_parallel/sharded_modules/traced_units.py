"""Sharded modules inside a root whose forward is compiled: the graph gathers and frees them.

::

    while a graph is traced     hooks put the results of `unshard` into the modules
    while it runs               operators drive the units, as hooks do in eager mode

So gradients, reductions and checks across ranks work as in eager mode, and units outside of the
graph can be mixed with units in it. The root's own hooks run outside of graphs. This file does not
depend on the compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from meshwright.comm.graphs.units import (
    BEGIN,
    BEGIN_BACKWARD,
    FREE,
    FREE_BACKWARD,
    NEEDED,
    NO_UNIT,
    START,
    START_BACKWARD,
    UnitForm,
    UnitPart,
    unshard,
)
from meshwright.comm.graphs.untraced import apart, constant
from meshwright.comm.groups.registry import PROCESS
from meshwright.data_parallel.replicas.traced import compiler_of_marks
from meshwright.data_parallel.sharded_modules.iteration import Iteration, gets_gradient
from meshwright.data_parallel.sharded_modules.module_hooks import Driver, driver_of
from meshwright.data_parallel.sharded_modules.module_tree import STATES
from meshwright.data_parallel.shards.replaced_parameters import converted
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import InternalError
from meshwright.torch_internals.autograd import function_transforms, running_backward
from meshwright.torch_internals.tracing import notes_of_trace

_log = logging.getLogger("meshwright")

Places = tuple[tuple[int, str, str], ...]
"""The places of whole parameters: which of the unit, the path of the module, its name there."""


class TracedDriver(Driver):
    """A driver that compilers may trace."""

    graphed: GraphedRoot | None = None
    """Of a root that was compiled."""
    root_name = ""
    """Of a root: unlike that of any other in this process."""
    look = ""
    """The root's name and the number of its units' state, which a graph is made for."""
    lent: Sequence[nn.Parameter | None] = ()
    """The parameters that modules hold at rest, while a forward is traced."""

    def join_root(self, iteration: Iteration) -> None:
        super().join_root(iteration)
        root = iteration.drivers[0]
        if not self.is_below:
            self.root_name = str(next(PROCESS.root_numbers))
        if isinstance(root, TracedDriver):
            self.look = look_of(root.root_name, 0)

    def joins_graph(self, module: nn.Module) -> bool:
        if not self.is_below or self.iteration is None:
            return False
        if not self._joins(self.look, self.iteration.drivers[0].is_driven):
            return False
        model, number, form, places = self._described(torch.is_grad_enabled())
        if model:
            wholes = unshard(self.iteration.token, model, number, form)
            lent = []
            for index, path, name in places:
                held = module.get_submodule(path)._parameters
                lent.append(held[name])
                held[name] = wholes[index]
            self.lent = lent
        return True

    def leaves_graph(self, module: nn.Module) -> bool:
        if not self.is_below or not self._has_joined():
            return False
        _, _, _, places = self._described(torch.is_grad_enabled())
        for (_, path, name), parameter in zip(places, self.lent, strict=True):
            module.get_submodule(path)._parameters[name] = parameter
        self.lent = ()
        return not self._has_written()

    # While a graph runs.

    @property
    def ends_next(self) -> bool:
        """True where the next backward of the unit is its last one pending."""
        return self._uses <= 1

    def end_forward(self, unit: Unit, iteration: Iteration, *, is_needed: bool) -> None:
        """End the unit's forward, as `after_forward` does; ``is_needed``: a backward follows."""
        if not is_needed:
            unit.reshard()
            return
        if running_backward() == -1:  # else a checkpoint recomputes it
            self._uses += 1
            self._in_graphs += 1
            self.has_run = True
            self._changes = unit.changes
        if not unit.settings.keep_full_after_forward and unit.reshard(for_backward=True):
            iteration.in_blocks.append(unit)

    def check_unchanged(self, unit: Unit) -> None:
        """Raise RuntimeError where parameters have changed since the forward."""
        if unit.changes != self._changes:
            raise converted(self.name, unit.communicators)

    # What a trace asks for once, and keeps as a constant.

    @constant
    def _joins(self, look: str, is_driven: bool) -> bool:
        iteration = self.iteration
        root = None if iteration is None else iteration.drivers[0]
        if iteration is None or not isinstance(root, TracedDriver):
            return False
        if root.graphed is None:
            root.graphed = GraphedRoot(root, iteration)
        return _graphed(self).joins(self)

    @constant
    def _has_joined(self) -> bool:
        return self in _joined()

    @constant
    def _has_written(self) -> bool:
        """Whether the forward being traced has written to a full parameter."""
        return compiler_of_marks().has_written()

    @constant
    def _described(self, has_backward: bool) -> tuple[str, int, str, Places]:
        """Describe the unit for a graph: model, number, form and places."""
        unit, root = self.unit, _graphed(self)
        if unit is None:
            return "", NO_UNIT, "", ()
        paths = {part: path for path, part in _joined()[self].named_modules()}
        places = tuple(
            (index, paths[part], name)
            for index, slot in enumerate(unit.slots)
            for part, name in slot.places
        )
        number, form = root.describe(self, unit, has_backward=has_backward)
        return root.name, number, form, places


class GraphedRoot:
    """The units of one root, addressed by number from graphs."""

    def __init__(self, root: TracedDriver, iteration: Iteration) -> None:
        self.name = root.root_name
        """The name that operators carry."""
        self._iteration = iteration
        self._drivers = iteration.drivers
        self._told = ""
        """The obstacle that was logged last."""
        self._looks: list[tuple[object, ...]] = []
        """The states that the units have been in, by number."""
        self._is_wanted = False
        """True when the backward pass that runs gives parameters gradients."""
        PROCESS.roots[self.name] = self
        iteration.follow_with(self.follow)
        self.follow()

    def follow(self) -> None:
        """Record the current form of the units: compilers trace again for a new one."""
        asked = self._iteration.announce is not None, self._iteration.most_in_flight
        groups = [(d.unit, g) for d in self._drivers if d.unit is not None for g in d.unit.groups]
        lines = ((g.buffer.full.dtype, g.buffer.layout.shapes) for _, g in groups)
        trains = (tuple(unit.exposure.trains(unit, group)) for unit, group in groups)
        look = (*asked, *lines, *trains)
        if look not in self._looks:
            self._looks.append(look)
        now = look_of(self.name, self._looks.index(look))
        for driver in self._drivers:
            if isinstance(driver, TracedDriver) and driver.look != now:
                driver.look = now
                if driver.unit is not None:  # in a graph there is no autograd to do it
                    driver.unit.exposure.follow_training(driver.unit)

    # ------------------------------------------------------------------ while a graph is traced

    def joins(self, driver: Driver) -> bool:
        """Take the unit of ``driver`` into the graph, or log what prevents it."""
        modules = compiler_of_marks().modules_of_trace()
        root = next((each for each in modules if driver_of(each) is self._drivers[0]), None)
        if root is None:
            return False  # a part of the model is compiled by itself
        joined = _joined()
        if driver in joined:
            obstacle = f"{driver.name!r} is called several times in a forward"
        else:
            obstacle = "" if joined else self._obstacle(root)
        if not obstacle:
            joined[driver] = next(part for part in root.modules() if driver_of(part) is driver)
        elif obstacle != self._told:
            self._told = obstacle
            _log.info("shards are gathered outside of the compiled graph: %s", obstacle)
        return not obstacle

    def describe(self, driver: Driver, unit: Unit, *, has_backward: bool) -> tuple[int, str]:
        """Return the index of ``driver``, and the current `UnitForm` of its ``unit`` as text."""
        names = [each.name for each in self._drivers]
        around = [n for n, name in enumerate(names) if n and driver.name.startswith(f"{name}.")]
        parts: list[UnitPart] = []
        for line, group in enumerate(unit.groups):
            trains = unit.exposure.trains(unit, group)
            for index, shape in enumerate(group.buffer.layout.shapes):
                start = group.buffer.layout.whole_start(index)
                parts.append(UnitPart(line, start, tuple(shape), trains[index]))
        fulls = [group.buffer.full for group in unit.groups]
        lines = [(str(full.dtype).removeprefix("torch."), full.numel()) for full in fulls]
        form = UnitForm(unit.name, tuple(around), tuple(lines), tuple(parts), has_backward)
        return self._drivers.index(driver), form.text()

    def _obstacle(self, module: nn.Module) -> str:
        iteration, drivers = self._iteration, self._drivers
        slots = [slot for d in drivers if d.unit is not None for slot in d.unit.slots]
        parts = list(module.modules())
        reasons = {
            compiler_of_marks().obstacle_to_gathers(module): True,
            "on a device gathers have streams of their own": not all(
                axis.is_on_host for axis in iteration.axes
            ),
            "a pipeline or another method drives the units": any(d.is_driven for d in drivers),
            "uneven inputs are joined": iteration.announce is not None,
            "it runs in a transform of torch.func": function_transforms() is not None,
            "a unit has several modules": any(driver.has_parts for driver in drivers),
            "parameters are parts of DTensors, or gathered by a class of their own": any(
                slot.outer is not None or slot.extension is not None for slot in slots
            ),
            "set_reduce_scatter_max_input_buffers bounds the reductions": (
                iteration.most_in_flight is not None
            ),
            "a part is replicated": any("replicate" in p.__dict__.get(STATES, {}) for p in parts),
            "recurrent modules keep their weights in a list of their own": any(
                isinstance(part, nn.RNNBase) for part in parts
            ),
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds and reason)

    # ------------------------------------------------------------------ while a graph runs

    @apart
    def drive(self, what: str, number: int, said: str) -> None:
        if what == BEGIN:
            self._iteration.begin_graph(f"a compiled forward pass ({said})")
        elif what == BEGIN_BACKWARD:
            self._begin_backward(said)
        elif what in (START, START_BACKWARD, FREE, FREE_BACKWARD):
            driver, unit = self._at(number)
            if what == START:
                if running_backward() == -1:
                    self._iteration.record(driver)
                unit.unshard()
            elif what == START_BACKWARD:
                driver.check_unchanged(unit)
                unit.unshard()
            elif what == FREE:
                driver.end_forward(unit, self._iteration, is_needed=said == NEEDED)
            elif not unit.settings.keep_full_after_backward:
                unit.reshard()

    @apart
    def whole(self, number: int, line: int) -> torch.Tensor:
        _, unit = self._at(number)
        unit.wait_unshard()
        return unit.groups[line].buffer.full

    @apart
    def send(self, number: int, gradients: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """End the unit's backward; see `TracedRoot`."""
        driver, unit = self._at(number)
        slots = unit.slots if self._is_wanted else ()
        # What is not sent at once must not lie where the graph writes next.
        is_sent = driver.ends_next and unit.settings.synchronize
        for index, gradient in zip(indices, gradients, strict=True):
            if slots and slots[index].full.requires_grad:
                leaf = slots[index].leaf
                if leaf.grad is not None:
                    leaf.grad.add_(gradient)
                else:
                    leaf.grad = gradient.contiguous() if is_sent else gradient.clone()
        driver.after_backward()

    def _begin_backward(self, digest: str) -> None:
        token = self._iteration.token
        self._is_wanted = token is not None and gets_gradient(token)
        if not self._iteration.is_in_backward:
            self._iteration.begin_backward()
        self._iteration.begin_graph(f"a compiled backward pass ({digest})")

    def _at(self, number: int) -> tuple[TracedDriver, Unit]:
        driver = self._drivers[number]
        if driver.unit is None or not isinstance(driver, TracedDriver):
            raise InternalError(f"a graph drives {driver.name!r}, which has no parameters now")
        return driver, driver.unit


def look_of(name: str, number: int) -> str:
    """The form of root ``name`` as text: compilers compare it, so equal models share no graph."""
    return f"{name} {number}"


def _joined() -> dict[Driver, nn.Module]:
    """The drivers whose units are in the graph being traced, with their modules.

    Older compilers do not accept a module as argument of a function with a cached result.
    """
    return cast("dict[Driver, nn.Module]", notes_of_trace().setdefault("joined", {}))


def _graphed(driver: Driver) -> GraphedRoot:
    root = None if driver.iteration is None else driver.iteration.drivers[0]
    if not isinstance(root, TracedDriver) or root.graphed is None:
        raise InternalError(f"{driver.name!r} is traced and belongs to no root that is")
    return root.graphed
