"""Uneven inputs of sharded modules: a rank without batches still takes part in each collective.

The shards of a rank that is done are still needed and updated. It acts on each notice::

    UNSHARD n          gathers unit n, and frees it
    REDUCE n           takes part with zeros in the reduction of unit n; REDUCE_FURTHER n in hybrid
    DELIVER            sets the gradients of its shards
    CLIP               clips its gradients as the others do (facade only)
    STEP k             steps its optimizer k, with the settings of the others (learning rates etc.)

Notices say what each training rank does next, and are compared; the order check of the units is
suspended meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_pre_hook,
)

from meshwright.comm import Communicator
from meshwright.data_parallel.replicas.join import Attendance, Notice
from meshwright.data_parallel.sharded_modules.iteration import Iteration
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.data_parallel.shards.unit import Unit
from meshwright.torch_internals.modules import step_hooks_of_all


class _Joined:
    """One sharded root inside a ``join`` block."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        divides_by_all: bool,
        throws: bool,
    ) -> None:
        self.iteration = _root_iteration(module)
        self._module = module
        self._units = self.iteration.units
        self._optimizers = list(optimizers)
        self._divides_by_all = divides_by_all
        self._has_stepped = False
        """True when the gradients that there are have been used."""
        for group in (group for unit in self._units for group in unit.groups):
            if group.axes.exchange is not None:
                raise ValueError(
                    f"join: the module of {group.slots[0].name!r} exchanges samples over axis "
                    f"{group.axes.exchange.axis!r} in its forward, which a rank without inputs "
                    "does not run. Give every rank equally many batches"
                )
        widest = max(self._units, key=lambda unit: max(g.axes.size for g in unit.groups))
        self._attendance = Attendance(widest.communicators, throws=throws)

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Announce each collective and each step before it begins, while this rank has inputs."""
        before = [(unit.settings.divide_factor, unit.settings.block) for unit in self._units]
        handle = register_optimizer_step_pre_hook(self._before_step)
        iteration = self.iteration
        iteration.announce, iteration.announce_clip = self._before_delivery, self._before_clip
        for unit in self._units:
            # A rank that is done holds no part of the blocks that others keep after a forward.
            unit.forget_block()
            unit.change(block=None)
            unit.announce = self._before_move
        try:
            yield
        finally:
            handle.remove()
            iteration.announce = iteration.announce_clip = None
            for unit, (factor, block) in zip(self._units, before, strict=True):
                unit.announce = None
                unit.change(divide_factor=factor, block=block)

    def shadow(self) -> None:
        """Take part without inputs until no rank has any."""
        with contextlib.ExitStack() as settings:
            for unit in self._units:
                settings.enter_context(unit.changed())
                unit.reshard()
            while (found := self._attendance.leave()) is not None:
                self._follow(*found)

    # --------------------------------------------------------------------- ranks that train

    def _before_move(self, unit: Unit, move: str) -> None:
        notice = Notice[move.upper()]
        self._attendance.give(notice, self._units.index(unit))
        if notice is Notice.REDUCE:
            self._divide(unit)

    def _before_delivery(self) -> None:
        self._attendance.give(Notice.DELIVER)
        self._has_stepped = False

    def _before_clip(self, max_norm: float, norm_type: float) -> None:
        self._attendance.give(Notice.CLIP)
        _share(self._attendance.communicators, [max_norm, norm_type])

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` has parameters of the root."""
        mine = {id(parameter) for parameter in self._module.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not self.holds(optimizer):
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._attendance.give(Notice.STEP, self._optimizers.index(optimizer))
        numbers = [_numbers(group) for group in optimizer.param_groups]
        _share(self._attendance.communicators, numbers)
        self._has_stepped = True

    # --------------------------------------------------------------------- ranks that are done

    def _follow(self, notice: Notice, number: int) -> None:
        if notice is Notice.DELIVER:
            self._deliver()
            return
        if notice is Notice.STEP:
            self._step(number)
            return
        if notice is Notice.CLIP:
            numbers = _share(self._attendance.communicators)
            self._module.clip_grad_norm_(*numbers)  # pyrefly: ignore[not-callable]
            return
        unit = self._units[number]
        if notice is Notice.UNSHARD:
            unit.unshard()
            unit.wait_unshard()
            unit.reshard()
        elif notice is Notice.REDUCE:
            unit.finish_reduce()
            # The second sum has a notice of its own: ranks that train may leave it out.
            unit.change(all_reduce=False)
            self._divide(unit)
            unit.reduce()
        else:
            unit.change(all_reduce=True)
            unit.reduce_further()

    def _deliver(self) -> None:
        if self._has_stepped:
            self._has_stepped = False
            for parameter in self._module.parameters():
                parameter.grad = None
        for unit in self._units:
            unit.finish_reduce()
        self.iteration.deliver()
        self.iteration.stop()

    def _step(self, number: int) -> None:
        settings = _share(self._attendance.communicators)
        if number >= len(self._optimizers):
            raise RuntimeError(
                f"join: the ranks that train step optimizer {number} of this "
                f"{type(self._module).__name__}, and this rank, which is done, has not seen it "
                "step. Pass join(optimizers=[...]) on every rank, in the same order"
            )
        optimizer = self._optimizers[number]
        for group, numbers in zip(optimizer.param_groups, settings, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()})
        optimizer.step()
        self._has_stepped = True

    def _divide(self, unit: Unit) -> None:
        if not self._divides_by_all:
            active = len(self._attendance.active)
            unit.change(divide_factor=float(active))


class JoinsUnevenInputs(nn.Module):
    """The `join` methods that all classes of sharded modules share."""

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> Iterator[None]:
        """Open a block in which ranks may run different numbers of iterations of the sharded root.

        Gradients are divided by the number of all ranks (``divide_by_initial_world_size``) or of
        those that still train; a communication hook does the whole division itself. Optimizers that
        step this module inside the block are detected, and a rank that is done steps its own with
        the others; a rank that may have no batch at all must pass ``optimizers``. Gradients must be
        zeroed between a step and the next backward pass. The FSDP class's own clipping is joined.
        Collectives of the user on the same axes are not, `torch.nn.utils.clip_grad_norm_` of
        DTensors among them, and `ShardedGradScaler` raises inside the block.

        Raises RuntimeError on all ranks when the first has no more inputs, with
        ``throw_on_early_termination``; ValueError for a module that is not a sharded root.
        """
        if not enable:
            yield
            return
        joined = _Joined(
            self,
            optimizers,
            divides_by_all=divide_by_initial_world_size,
            throws=throw_on_early_termination,
        )
        with joined.iteration.without_order_check():
            with joined.announcing():
                yield
            joined.shadow()


def joins(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` steps a root that is inside a `join` block."""
    owners = (getattr(hook, "__self__", None) for hook in step_hooks_of_all.values())
    return any(isinstance(owner, _Joined) and owner.holds(optimizer) for owner in owners)


def _root_iteration(module: nn.Module) -> Iteration:
    driver = driver_of(module)
    iteration = None if driver is None else driver.start(module)
    if driver is None or iteration is None or not driver.is_root:
        raise ValueError(
            f"join needs the sharded root, found a {type(module).__name__} that is "
            f"{'not sharded' if driver is None else 'inside of one'}"
        )
    return iteration


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """List the settings of one parameter group that are plain numbers."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, bool | int | float)
        or (isinstance(value, tuple) and all(isinstance(part, int | float) for part in value))
    }


def _share(communicators: Sequence[Communicator], mine: Any = None) -> Any:  # noqa: ANN401 - JSON
    """Return the first value among ranks that is not None; a collective on each axis."""
    for axis in communicators:
        rows = axis.gather_values(mine, label="uneven inputs: optimizer")
        mine = next((row for row in rows if row is not None), None)
    return mine
