"""The state that units of one root share in an iteration: order, prefetching, end of the backward.

::

    root's forward   begin_forward, record for each unit, end_forward
    backward         begin_backward, start_reduction for each unit, end_backward (autograd calls it)

An iteration that raised is abandoned when the next one begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, is_not
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright import comm
from meshwright.comm import Communicator
from meshwright.comm.failures.events import GroupEvent
from meshwright.comm.graphs.untraced import apart
from meshwright.comm.groups.registry import go_on
from meshwright.data_parallel.checks.alignment import on_any
from meshwright.data_parallel.checks.forward_writes import BatchBuffers
from meshwright.data_parallel.checks.step_watch import Steps, StepWatch
from meshwright.data_parallel.modules.batch_norm import LocalStatistics
from meshwright.data_parallel.sharded_modules.agreement import (
    ACCUMULATES,
    INTERRUPTED,
    STEPPED,
    UNKNOWN,
    Ledger,
    NonFinite,
    OrderedUnit,
    UnitStates,
    compare_units,
    copies_of,
)
from meshwright.data_parallel.sharded_modules.module_tree import ModuleTree
from meshwright.data_parallel.shards.gradient_lines import Summand, sum_parts
from meshwright.data_parallel.shards.parameter_group import ParameterGroup, have_gradients
from meshwright.data_parallel.shards.replaced_parameters import rank_in
from meshwright.data_parallel.shards.slot import accumulator_of
from meshwright.data_parallel.shards.unit import Phase, Unit, UnitStreams
from meshwright.gradients import warn_without_gradients
from meshwright.torch_internals.autograd import accumulates, at_end_of_backward, keeps_graph

if TYPE_CHECKING:
    from meshwright.data_parallel.sharded_modules.module_hooks import Driver

IN_FLIGHT = 1
"""Reductions that may be in flight for each axis of a unit; beyond that, the oldest is waited for
before another one starts. Each holds the full gradients of its unit."""

_SHARD = attrgetter("buffer.shard")

OF_PARAMETERS = "a backward pass"
OF_INPUTS = "a backward pass that gives no parameter a gradient"

REMEMBERED = 8
"""Forwards of the root without a backward after which all of them are forgotten."""


class Iteration:
    """The state that ``drivers`` (the root's first) share, from one iteration to the next."""

    token: torch.Tensor | None = None
    """The tensor that graphs that gather write to, see `traced_units`; its gradient is zero."""
    _follow: Callable[[], None] | None = None
    _written: BatchBuffers | None = None

    def __init__(self, drivers: Sequence[Driver], *, in_detail: bool = False) -> None:
        self.drivers = tuple(drivers)
        self.tree: ModuleTree | None = None
        """The modules of the root; set when it has started."""
        self.sends_use_counts = True
        """True when ranks tell each other which parameters had a gradient; else all had one."""
        self.finished: list[Driver] = []
        """Units in the order in which their forward ended."""
        self.in_flight: list[Unit] = []
        """Units whose gradients are being reduced, the oldest first."""
        self.most_in_flight: int | None = None
        """The most reductions that may be in flight; `IN_FLIGHT` for each axis when None."""
        self.in_blocks: list[Unit] = []
        """Units whose full parameters are resharded among fewer ranks than their shards."""
        self.is_in_backward = self.is_in_forward = self.ended_in_forward = False
        self.keeps_graph = self.makes_graph = False
        """Of the last backward pass: its graph may be run again; its gradients have gradients."""
        self.keeps_sums = self.is_of_inputs = False
        """A backward pass has left sums for a later one; the last gave no parameter a gradient."""
        self.showing: list[Unit] = []
        """Units of which ``.grad`` shows what waits for a reduction."""
        self.statistics: LocalStatistics | None = None
        """Says once what there is to say of BatchNorm modules below the root."""
        units = [driver.unit for driver in drivers if driver.unit is not None]
        self.axes = tuple(dict.fromkeys(axis for unit in units for axis in unit.communicators))
        """The axes over which the units communicate."""
        self.announce: Callable[[], None] | None = None
        """Called before gradients are set; it may be a collective."""
        self.announce_clip: Callable[[float, float], None] | None = None
        """Called with the largest norm and its kind before gradients are clipped."""
        self._numbers = {driver: number for number, driver in enumerate(drivers)}
        self._expected: list[Driver] = []
        self._order: list[Driver] = []
        self.units, self._slots = units, [slot for unit in units for slot in unit.slots]
        self._stops = any(driver.stops_on_non_finite for driver in drivers)
        if self._stops:
            for unit in units:
                unit.change(is_watched=True)
        groups = [group for unit in units for group in unit.groups]
        numbers = {axes: n for n, axes in enumerate(dict.fromkeys(g.axes for g in groups))}
        self._axes_of = {group: numbers[group.axes] for group in groups}
        """A number for the axes of each group, so that no pass has to compare axes."""
        self._unread: list[Callable[[], object]] = []
        """Answers of the last exchange of use flags that this rank did not need."""
        self._non_finite: NonFinite | None = None
        """The finding of the last backward pass at which all ranks are to stop."""
        self._versions: list[int] = []
        self._shards: list[torch.Tensor] = []
        self._has_delivered = self._has_warned = False
        """True when the last backward left gradients here; when a step without any was reported."""
        self._raised_in = ""
        """The pass that was given up last, until the next one has begun."""
        self._streams = _streams_of(units, self.axes)
        self._steps = StepWatch(self._exposed, self._given, self._before_step, with_settings=True)
        self._widest = communicator = _widest(units)
        self._ledger: Ledger | None = None
        if communicator is not None and not communicator.is_alone:
            # At debug level DETAIL, torch's class does not compare which parameters train.
            compare_units(communicator, self.drivers, with_training=not in_detail)
            self._ledger = Ledger(
                communicator,
                [_ordered(driver) for driver in drivers],
                in_detail=in_detail,
                root=drivers[0].name,
                states=UnitStates(drivers, with_training=not in_detail),
                copies=copies_of(drivers),
                axes=self.axes,
            )

    def look_at(self, module: nn.Module, tree: ModuleTree) -> None:
        """Watch the modules of the root ``module`` and the statistics of its BatchNorm modules."""
        self.tree, self.statistics = tree, LocalStatistics(module, self.axes)
        if self._widest is not None:
            self._written = BatchBuffers(module, self._widest)

    def follow_with(self, follow: Callable[[], None]) -> None:
        """Call ``follow`` when a forward begins; compiled graphs may gather from now on."""
        self._follow = follow
        self.token = torch.zeros((), device="cpu", requires_grad=True)

    # --------------------------------------------------------------------------- forward

    def begin_forward(self, *, training: bool) -> None:
        """Begin the root's forward; an iteration that raised is abandoned first."""
        self._check_taken()
        raised_in = self._begin()
        if self._follow is not None:
            self._follow()
        if self._order:  # empty after an abandoned pass: the order before that one stays
            self._expected, self._order = self._order, self._expected
            self._order.clear()
        if len(self.finished) > REMEMBERED * len(self.drivers):
            self.finished.clear()
        if self._ledger is None:
            return
        is_training = training and torch.is_grad_enabled()
        what = "a forward pass in training" if is_training else "a forward pass in evaluation"
        self._ledger.begin_pass(what, training=is_training, after=raised_in)
        weights = self._weights(bool(raised_in)) if is_training else UNKNOWN
        if is_training and self._written is not None and self._written.is_due:
            if not raised_in:
                self._written.compare()
            self._written.note()
        settings = self._steps.settings if is_training else ()
        self._ledger.begin(training=is_training, weights=weights, settings=settings)

    def _begin(self) -> str:
        """Begin a forward; returns the earlier pass that raised, "" if none did."""
        # The user goes on: what this rank raised before must not end its waits from here on.
        go_on()
        if self.is_in_backward or self.is_in_forward:
            self.reset()
        raised_in, self._raised_in = self._raised_in, ""
        self.is_in_forward, self.ended_in_forward = True, False
        if self.statistics is not None and self.statistics.is_due and torch.is_grad_enabled():
            self.statistics.tell()
        for unit in self.units:
            unit.exposure.refresh(unit)
            if unit.phase is Phase.FULL:
                unit.exposure.follow_training(unit)
                unit.find_trainable()
        if self.tree is not None and torch.is_grad_enabled():
            self.tree.verify()
        while self.in_blocks:
            # Their backward has passed or will not come: what is gathered now is what is held now.
            self.in_blocks.pop().forget_block()
        if self._streams is not None:
            self._streams.begin()
        return raised_in

    def begin_driven(self, what: str, *, training: bool) -> None:
        """Begin a step that a pipeline's schedule drives; an exception ends it.

        The schedule gathers units in its own order, so none is recorded. ``what`` is compared
        across ranks like a forward pass.
        """
        raised_in = self._begin()
        self.take_waiting()
        self.finished.clear()
        if self._ledger is not None:
            self._ledger.begin_pass(what, training=training, after=raised_in)

    def end_driven(self, *, training: bool) -> None:
        """End a driven step: wait for its remaining reductions, and set gradients."""
        if training and self.drivers[0].is_last_backward:
            self._settle()
        self.is_in_forward = False
        if self._streams is not None:
            self._streams.end()
        self.stop()

    def record(self, driver: Driver) -> Driver | None:
        """Record that ``driver`` runs next; returns the driver that followed it the last time."""
        if self._ledger is not None:
            self._ledger.record(self._numbers[driver])
        position = len(self._order)
        self._order.append(driver)
        expected = self._expected
        if position + 1 < len(expected) and expected[position] is driver:
            return expected[position + 1]
        return None

    def begin_graph(self, what: str) -> None:
        """Compare ``what`` a compiled graph is about to do with the other ranks."""
        if self._ledger is not None:
            self._ledger.begin_graph(what)

    def end_forward(self) -> None:
        """End the root's forward."""
        self.is_in_forward = False
        # With gradients the backward gathers from the same shards, and `end_backward` ends this.
        if self._streams is not None and not torch.is_grad_enabled():
            self._streams.end()
        if self._ledger is not None:
            self._ledger.end_forward()

    def limit_in_flight(self) -> None:
        """Apply the largest `Driver.most_in_flight` that was set, if any."""
        asked = [d.most_in_flight for d in self.drivers if d.most_in_flight is not None]
        self.most_in_flight = max(asked, default=None)

    def reset(self) -> None:
        """Abandon an iteration that ended in an exception."""
        self.take_waiting()
        self.makes_graph = False
        if self.is_in_backward or self.is_in_forward:
            self._raised_in = f"a {'backward' if self.is_in_backward else 'forward'} pass"
        for driver in self.drivers:
            driver.drop()
        for kept in (self._order, self.finished, self.in_flight):
            kept.clear()
        self.is_in_backward = self.is_in_forward = False

    def _weights(self, has_raised: bool) -> int:
        """Classify what optimizers have done since the last call, as far as this rank knows."""
        steps = self._steps.take()
        has_delivered, self._has_delivered = self._has_delivered, False
        if steps is Steps.RAISED:
            return INTERRUPTED
        has_changed = None if self._steps.has_seen else self._have_versions_changed()
        if steps is Steps.ENDED or has_changed:
            return STEPPED
        # Gradients that were to be used and are gone without a step were left out.
        has_unused = has_delivered or self._has_gradients() or has_raised
        is_known = self._steps.has_seen or has_changed is False
        return ACCUMULATES if is_known and has_unused else UNKNOWN

    def _have_versions_changed(self) -> bool | None:
        """Whether weights were written since the last call; None if unknown.

        For optimizers that are not torch's: reading versions is slow with many DTensors.
        """
        versions: list[int] = []
        shards: list[torch.Tensor] = []
        for unit in self.units:
            versions.append(unit.exposure.version(unit))
            shards += map(_SHARD, unit.groups)
        before, self._versions = self._versions, versions
        then, self._shards = self._shards, shards
        # A converted shard is another tensor, with a version counter of its own.
        if len(then) != len(shards) or any(map(is_not, then, shards)):
            return None
        return versions != before

    def _exposed(self) -> list[torch.Tensor]:
        return [p for unit in self.units for p in unit.exposure.parameters(unit)]

    def _given(self) -> list[torch.Tensor]:
        """Tensors no optimizer may hold: full ones, those from before sharding, those shown now."""
        slots = [slot for unit in self.units for slot in unit.slots]
        before = (slot.given() for slot in slots if slot.given is not None)
        shown = (module.__dict__.get(name) for slot in slots for module, name in slot.places)
        return [*(t for t in (*before, *shown) if t is not None), *(slot.full for slot in slots)]

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare copies in doubt, and warn about a step without gradients.

        Raises RuntimeError if ``optimizer`` would use gradients that wait for a reduction.
        """
        self._check_taken()
        waiting = self.showing
        if self.keeps_sums and not waiting:
            waiting = [unit for unit in self.units if unit.has_gradient]
        if waiting and (found := _held(waiting, optimizer)):
            raise RuntimeError(
                f"an optimizer steps while gradients of {found[0].name!r} wait for their "
                "reduction: the last backward pass was in no_sync. Run the last one of a "
                "step outside of it"
            )
        if self.finished:
            if not self._has_warned and not self._steps.has_closure:
                self._has_warned = warn_without_gradients(optimizer)
            # What a forward without a backward has left unsharded is stale after this step.
            whole = [unit for unit in self.units if unit.phase is Phase.FULL]
            for unit in _held(whole, optimizer):
                unit.has_changed()
                unit.reshard()
        # Not inside join: ranks that are done take part in announced collectives only.
        if self._ledger is not None:
            self._ledger.judge_copies()

    def _check_taken(self) -> None:
        """Raise RuntimeError if a backward has left gradients that no hook noticed."""
        if self.is_in_backward or not have_gradients(self._slots):
            return
        for unit in self.units:
            name = unit.take_unseen()
            if name:
                raise _lost(name, unit)

    def _has_gradients(self) -> bool:
        """Whether an optimizer step now would change anything on this rank."""
        return any(unit.exposure.has_gradients(unit) for unit in self.units)

    # -------------------------------------------------------------------------- backward

    def begin_backward(self) -> None:
        """Begin a backward pass: announce it, and have autograd call `end_backward`."""
        self.is_of_inputs = self.keeps_sums and not self._reaches_parameters()
        if self._ledger is not None:
            self._ledger.happens(GroupEvent(OF_INPUTS if self.is_of_inputs else OF_PARAMETERS))
        for unit in self.units:
            if unit.is_at_rest:  # without a gather: one rank alone may have listed its parameters
                unit.show_at_rest(False)
        self.is_in_backward, self.keeps_graph = True, keeps_graph()
        # Only `create_graph=True` leaves gradients enabled within a backward pass.
        self.makes_graph = torch.is_grad_enabled()
        if self.makes_graph:
            self._check_kept()
        self.take_waiting()
        at_end_of_backward(self.end_backward)

    def _reaches_parameters(self) -> bool:
        """Whether the running backward pass gives any parameter a gradient."""
        slots = (slot for unit in self.units for slot in unit.slots)
        return (self.token is not None and gets_gradient(self.token)) or any(
            gets_gradient(slot.leaf) or (slot.full is not slot.leaf and gets_gradient(slot.full))
            for slot in slots
            if slot.leaf.requires_grad
        )

    def _check_kept(self) -> None:
        freed = [unit.name for unit in self.units if not unit.settings.keep_full_after_forward]
        if freed:
            raise RuntimeError(
                "FSDP does not support gradients of gradients where parameters are freed after the "
                f"forward, as those of {freed[0]!r}: the second backward pass needs them. Keep "
                "them, with reshard_after_forward=False in all calls of fully_shard or "
                "ShardingStrategy.SHARD_GRAD_OP, or call backward without create_graph=True"
            )

    def take_waiting(self) -> None:
        """Hide gradients that wait for a reduction, and forget those that users dropped."""
        while self.showing:
            unit = self.showing.pop()
            unit.exposure.take_waiting(unit)

    def before(self, driver: Driver) -> Driver | None:
        """Return the driver whose forward ran just before ``driver``'s: its backward is next."""
        # The end of a backward clears `finished`: an older position may lie beyond it.
        for position in range(min(driver.position, len(self.finished)) - 1, -1, -1):
            other = self.finished[position]
            if other.unit is not None and other.unit is not driver.unit:
                return other
        return None

    def start_reduction(self, unit: Unit, *, is_limited: bool = True) -> None:
        """Reduce the gradients of ``unit``; ``is_limited`` bounds the reductions in flight."""
        if unit.is_reducing:
            unit.finish_reduce()
            self.in_flight.remove(unit)
        if is_limited:
            # Hybrid sharding sums twice: their second sums run beside the first sum of this unit.
            for other in self.in_flight:
                other.reduce_further()
            asked = self.most_in_flight
            most = IN_FLIGHT * unit.sums if asked is None else asked
            while len(self.in_flight) >= most:
                self.in_flight.pop(0).finish_reduce()
        # Not earlier: a reduction that has ended frees its memory before this one takes some.
        for group in unit.groups:
            group.accumulate()
        unit.reduce()
        self.in_flight.append(unit)

    @torch.no_grad()
    @apart
    def end_backward(self) -> None:
        """End the backward pass: reduce the rest, wait, set gradients, free everything.

        A backward that is not the last, or that makes a graph, leaves reductions in flight,
        gradients undelivered and the order of the forwards unchanged for the backwards that follow.
        """
        if self.makes_graph:
            self._end_graph()
            return
        self.ended_in_forward = self.is_in_forward
        # In an order that all ranks share, near that of the backward: each may issue collectives.
        for driver in reversed(self.drivers):
            driver.finish_backward(self)
        if self._streams is not None:
            self._streams.end()
        for unit in self.units:
            waits = self.is_of_inputs or not unit.settings.synchronize
            if waits and unit.exposure.show_waiting(unit):
                self.showing.append(unit)
        if self.is_of_inputs or not self.drivers[0].is_last_backward:
            self.is_in_backward, self.keeps_sums = False, True
            return
        self._settle()
        # Only now: where `_settle` raises, the next forward finds the pass open and abandons it.
        self.is_in_backward = False
        self.stop()

    def _end_graph(self) -> None:
        self.is_in_backward = self.makes_graph = False
        found = [s for s in self._slots if s.leaf.grad is not None and s.leaf.grad.requires_grad]
        for slot in found:
            slot.leaf.grad = None
        if found:
            raise RuntimeError(
                f"the gradient of sharded parameter {found[0].name!r} has a graph, which a sum "
                "over the ranks ends: take gradients of inputs with torch.autograd.grad("
                "..., create_graph=True), and call backward without it"
            )

    def stop(self) -> None:
        """Raise NonFiniteError on every rank if the last gradients are to stop the run."""
        found, self._non_finite = self._non_finite, None
        if found is not None:
            raise found.error()

    def _settle(self) -> None:
        """Wait for all reductions and set gradients."""
        # All second sums are issued before any is waited for, so that they overlap.
        for unit in self.in_flight:
            unit.reduce_further()
        for unit in self.in_flight:
            unit.finish_reduce()
        self.in_flight.clear()
        if self._ledger is not None:
            # Before gradients are set: no optimizer on the host may use those of ranks that differ.
            self._ledger.finish()
        self.deliver()
        self._has_delivered = self._ledger is not None and self._has_gradients()
        self.finished.clear()

    @contextlib.contextmanager
    def without_order_check(self) -> Iterator[None]:
        """Suspend the comparison of passes in the block: the caller compares."""
        ledger, self._ledger = self._ledger, None
        try:
            yield
        finally:
            self._ledger = ledger

    def deliver(self) -> None:
        """Set the gradients of units whose reductions have ended; may first exchange use flags."""
        units: list[Unit] = []
        groups: list[ParameterGroup] = []
        for unit in self.units:
            for group in unit.groups:
                if group.mean is not None:
                    units.append(unit)
                    groups += unit.trainable_groups
                    break
        if not units:
            return
        if self._streams is not None:
            self._streams.deliver(to_host=any(g.home for unit in units for g in unit.groups))
        if self.announce is not None:
            self.announce()
        while self._unread:
            self._unread.pop()()
        summands: list[Summand] = []
        on_axes: dict[int, list[ParameterGroup]] = {}
        for group in groups:
            if group.partial_sums:
                summands += group.partial_means()
            on_axes.setdefault(self._axes_of[group], []).append(group)
        if summands:
            sum_parts(summands)
        used: dict[ParameterGroup, list[bool]] = {}
        found = NonFinite.of(units) if self._stops else NonFinite()
        for together in on_axes.values():
            communicators, flags = together[0].axes.reached, list[bool]()
            for group in together:
                flags += group.used
            # One flag more where a pass is to stop; it needs no collective beside use counts.
            told = [*(flags if self.sends_use_counts else ()), *found.flags]
            for axis in communicators if told else ():
                told = on_any(axis, told, self._unread)
            if found.flags and told.pop():
                self._non_finite = replace(found, axes=communicators)
            if self.sends_use_counts:
                flags = told
            at = 0
            for group in together:
                used[group] = flags[at : at + len(group.slots)]
                at += len(group.slots)
        for unit in units:
            for group in unit.trainable_groups:
                if group.mean is not None:
                    unit.exposure.set_gradients(unit, group, group.take_mean(), used[group])


def _ordered(driver: Driver) -> OrderedUnit:
    unit = driver.unit
    if unit is None:
        return OrderedUnit(name=driver.name)
    return OrderedUnit(
        name=driver.name,
        parameters=tuple(slot.name for slot in unit.slots),
        payload=tuple(_sent(group) for group in unit.groups),
    )


def _streams_of(units: Sequence[Unit], axes: Sequence[Communicator]) -> UnitStreams | None:
    """Create the streams that ``units`` use from now on; None on the host."""
    devices = {axis.device for axis in axes if not axis.is_on_host}
    streams = UnitStreams(*devices) if len(devices) == 1 else None
    if streams is not None:
        for unit in units:
            unit.streams = streams
    return streams


def _sent(group: ParameterGroup) -> int:
    """Count the bytes that this rank contributes to the gather of ``group``."""
    return group.buffer.layout.shard_size * group.types.compute.itemsize


def _widest(units: Sequence[Unit]) -> Communicator | None:
    """The communicator with the most ranks that run the same units."""
    axes = [axis for unit in units for axis in unit.communicators]
    size = max((group.axes.size for unit in units for group in unit.groups), default=1)
    found = max(axes, key=lambda axis: axis.size, default=None)
    if found is None or found.size == size or not comm.is_connected():
        return found
    world = comm.communicator()
    return world if world.size == size else found


def _held(units: Iterable[Unit], optimizer: torch.optim.Optimizer) -> list[Unit]:
    """List the units with a parameter that ``optimizer`` holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [u for u in units if any(id(p) in held for p in u.exposure.parameters(u))]


def gets_gradient(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass accumulates a gradient of ``leaf``."""
    return accumulates(accumulator_of(leaf))


_RETURN = (
    "A loss that a forward leaves in a closure, a global variable or an object of a class of its "
    "own is not seen beside its output: return it, or keep it in an attribute of the module or in "
    "a list there"
)


def _lost(name: str, unit: Unit) -> RuntimeError:
    """Make the error for a gradient of parameter ``name`` that no hook of ``unit`` announced."""
    return RuntimeError(
        f"rank {rank_in(unit.communicators)}: a backward pass has given sharded parameter {name!r} "
        f"a gradient and went through no output of unit {unit.name!r}: nothing has reduced it, and "
        f"it is dropped. {_RETURN}"
    )
