"""Replicated and sharded modules driven by a pipeline's schedule, by the interface of `pipelining`.

From ``begin`` to ``finish`` the modules' own hooks are inactive: ``unshard`` gathers parameters,
gradients of microbatches add up on this rank, and ``reduce`` sums them once. The settings of
``no_sync`` and ``set_requires_gradient_sync`` apply to whole steps. The order of units needs no
check then: all units of a stage are gathered together, in a fixed order. After a step that raised
on this rank alone, before any backward, the next one continues with the gathered parameters, so
that the other ranks need not notice. Otherwise it discards them.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from meshwright.comm.failures.sameness import require_equal
from meshwright.data_parallel.replicas.replica import Replica
from meshwright.data_parallel.sharded_modules.iteration import Iteration
from meshwright.data_parallel.sharded_modules.module_hooks import Driver, driver_of
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.torch_internals.tensors import version_of

_JOINED = (
    "join() does not reach into a pipeline, whose schedule reduces the gradients of its stages: "
    "leave the block, and give every data-parallel rank equally many steps"
)


class ReplicaResidency:
    """Drives a replica, which the first step sets up, a collective."""

    def __init__(self, replica: Replica) -> None:
        # The replica may hold this residency, so a strong reference back would be a cycle.
        self._replica: Replica = weakref.proxy(replica)
        self._compared: set[str] = set()
        self._has_begun = False
        """True when the next step continues one that has raised before any backward."""
        self._is_reducing = False

    def begin(self, what: str, *, training: bool) -> None:
        """Prepare for a step. Buffers of the first rank are broadcast once per step.

        All ranks compare ``what`` the step is before the first of its kind.
        """
        # A stage without anything to train may still have buffers to keep equal.
        replica = self._replica.set_up(may_be_frozen=True)
        if replica.reducer.on_reduction is not None:
            raise RuntimeError(_JOINED)
        if what not in self._compared:
            label = f"compare {what}"
            require_equal(replica.communicator, [what], "what they begin", label=label)
            self._compared.add(what)
        if not self._has_begun:
            replica.begin()
        self._has_begun = True
        replica.reducer.synchronize(False)
        replica.be_driven(True)

    def unshard(self) -> None:
        """Do nothing: replicas hold whole parameters."""

    def wait_unshard(self) -> None:
        """Do nothing: replicas hold whole parameters."""

    def accumulate(self) -> None:
        """Leave gradients in ``.grad``."""
        self._has_begun = False

    def reshard(self) -> None:
        """Do nothing: replicas hold whole parameters."""

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """None: modules compute with the parameters themselves."""
        return None

    def written(self, module: nn.Module, name: str) -> None:
        """Do nothing: replicas hold no other copy."""

    def reduce(self) -> None:
        """Start to average all gradients, unless reductions are switched off."""
        reducer = self._replica.reducer
        if reducer.is_wanted:
            self._is_reducing = True
            reducer.start()

    def finish(self) -> None:
        """Wait for the means."""
        self.drop()
        self._has_begun = False
        if self._is_reducing:
            self._is_reducing = False
            self._replica.reducer.finish()

    def drop(self) -> None:
        """Re-enable the module's hooks."""
        self._replica.be_driven(False)


class ShardedResidency:
    """Drives all units of one root."""

    def __init__(self, module: nn.Module, driver: Driver) -> None:
        self._module = module
        self._root = driver
        self._is_training = False
        self._begun = ""
        """The step that the next one may continue: it has raised before any backward."""

    def begin(self, what: str, *, training: bool) -> None:
        """Prepare for a step, which is compared with that of the other ranks.

        Raises RuntimeError when the module is inside a root that has run before.
        """
        self.prepare(self._module, self._root)
        iteration = self._iteration
        if iteration.drivers[0] is not self._root:
            raise RuntimeError(
                f"module {self._root.name!r} of a pipeline stage has run as a part of "
                f"{iteration.drivers[0].name!r} before: give the stage the whole of it, or build "
                "the pipeline before the first forward"
            )
        if iteration.announce is not None:
            raise RuntimeError(_JOINED)
        self._is_training = training
        if self._begun != what:
            iteration.begin_driven(what, training=training)
        self._begun = what
        for driver in iteration.drivers:
            driver.is_driven = True

    def prepare(self, module: nn.Module, driver: Driver) -> None:
        """Set the root up before its first step."""
        driver.start(module)

    def unshard(self) -> None:
        """Start to gather all units."""
        for unit in self._iteration.units:
            unit.unshard()

    def wait_unshard(self) -> None:
        """Wait for all units."""
        for unit in self._iteration.units:
            unit.wait_unshard()

    def accumulate(self) -> None:
        """Add gradients up in the dtype of their reduction, if that differs."""
        self._begun = ""
        for unit in self._iteration.units:
            unit.keep_gradients()

    def reshard(self) -> None:
        """Free all units."""
        for unit in self._iteration.units:
            unit.reshard()

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """The full parameter of a unit that ``module`` uses as ``name``; None if it has none.

        Raises TypeError if the parameter or its gradient has another dtype at rest.
        """
        found = self._find(module, name)
        if found is None:
            return None
        group, index = found
        types = group.types
        if not types.master == types.compute == types.reduce:
            raise TypeError(
                f"parameter {group.slots[index].name!r} is tied to one of another stage, which "
                f"needs one dtype, but it is kept in {types.master}, computes in {types.compute} "
                f"and is reduced in {types.reduce}: leave its unit out of mixed precision"
            )
        return group.slots[index].leaf

    def written(self, module: nn.Module, name: str) -> None:
        """After a write to a whole parameter, copy it to the shards."""
        found = self._find(module, name)
        if found is not None:
            group, index = found
            whole = group.slots[index].leaf
            group.versions[index] = version_of(whole)
            group.buffer.fill([whole if n == index else None for n in range(len(group.slots))])

    def _find(self, module: nn.Module, name: str) -> tuple[ParameterGroup, int] | None:
        drivers = (driver_of(part) for part in self._module.modules())
        units = (driver.unit for driver in drivers if driver is not None)
        for unit in units:
            for group in () if unit is None else unit.groups:
                for index, slot in enumerate(group.slots):
                    if (module, name) in slot.places:
                        return group, index
        return None

    def reduce(self) -> None:
        """Start to sum the gradients of all units, except those that are not to be reduced.

        All at once, because their whole gradients are in memory in any case.
        """
        for unit in reversed(self._iteration.units):
            if unit.settings.synchronize and unit.trainable_groups:
                self._iteration.start_reduction(unit, is_limited=False)

    def finish(self) -> None:
        """Wait for the sums and set gradients."""
        self.drop()
        self._begun = ""
        self._iteration.end_driven(training=self._is_training)

    def drop(self) -> None:
        """Re-enable the module's hooks."""
        if self._root.iteration is not None:
            for driver in self._root.iteration.drivers:
                driver.is_driven = False

    @property
    def _iteration(self) -> Iteration:
        return self._root.start(self._module)


def sharded_residency(
    module: nn.Module, kind: type[ShardedResidency] = ShardedResidency
) -> ShardedResidency:
    """Return the driver of ``module``, or of a module around it that was driven before."""
    driver = driver_of(module)
    if driver is None:
        raise ValueError(f"fully_shard was not applied to this {type(module).__name__}")
    found = driver.residency
    if not isinstance(found, ShardedResidency):
        found = kind(module, driver)
        for part in module.modules():
            inner = driver_of(part)
            if inner is not None:
                inner.residency = found
    return found
