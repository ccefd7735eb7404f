"""One unit: parameters that are gathered and freed together, and reduce their gradients together.

The phase says where the parameters are::

    phase        may become
    SHARDED      GATHERING   (`unshard`)
    GATHERING    FULL        (`wait_unshard`)
    FULL         SHARDED     (`reshard`), REDUCING (`reshard` during a reduction)
    REDUCING     SHARDED     (`finish_reduce`), GATHERING (needed again before that)

A driver decides when. An `Exposure` defines what modules and optimizers see.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from meshwright.comm import Communicator, Pending
from meshwright.comm.streams import DeviceEvent, SideStream, captures, current_stream, record
from meshwright.data_parallel.shards.buffer import FlatBuffer, GatherPack, Moves, PackKey
from meshwright.data_parallel.shards.parameter_group import (
    ParameterGroup,
    UnitSettings,
    have_gradients,
)
from meshwright.data_parallel.shards.replaced_parameters import written
from meshwright.data_parallel.shards.slot import Slot
from meshwright.errors import InternalError
from meshwright.torch_internals.tensors import has_storage, set_versions, version_of


class Phase(StrEnum):
    """The phase of a unit's parameters and gradients."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    REDUCING = "reducing"


_IS_STALE = attrgetter("buffer.is_stale")
_IS_TRAINABLE = attrgetter("is_trainable")
_LEAF = attrgetter("leaf")

HERE = contextlib.nullcontext()
"""No stream beside the computation."""


class Exposure(ABC):
    """The view of a unit's parameters that modules and optimizers see."""

    @abstractmethod
    def show_sharded(self, unit: Unit) -> None:
        """Put the sharded parameters, which optimizers and state dicts see, into the modules."""

    @abstractmethod
    def show_full(self, unit: Unit) -> None:
        """Put ``slot.full`` of each slot into modules, with the current ``requires_grad``."""

    @abstractmethod
    def refresh(self, unit: Unit) -> None:
        """Take over new values and memory of parameters since the last pass.

        Raises RuntimeError, naming the parameter, for a tensor that a user has put in its place.
        """

    @abstractmethod
    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """List the parameters of the unit that optimizers may hold."""

    @abstractmethod
    def version(self, unit: Unit) -> int:
        """Return a number that grows with writes to the parameters, as far as torch counts them."""

    @abstractmethod
    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        """List, for each of the group's parameters, whether it requires grad now."""

    @abstractmethod
    def has_gradients(self, unit: Unit) -> bool:
        """Whether an optimizer step now would change this rank's part of the unit."""

    @abstractmethod
    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """Set or add to ``.grad``; ``used`` says which parameters had a gradient on any rank."""

    def show_waiting(self, unit: Unit) -> bool:
        """Show whole gradients that wait for a reduction as ``.grad``; True if there are any."""
        return False

    def take_waiting(self, unit: Unit) -> bool:
        """Restore the former ``.grad``, except what users have dropped; True if it was shown."""
        return False

    # What only some exposures have.

    @property
    def owner(self) -> nn.Module | None:
        """The module that registers one flat parameter for all; None where there is none."""
        return None

    @property
    def one_flat(self) -> nn.Parameter | None:
        """The parameter that stands for the whole unit; None where each one is visible."""
        return None

    def shown(self, slot: Slot) -> nn.Parameter:
        """Return the parameter that modules hold for ``slot`` at rest."""
        return slot.original

    def shows(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` is one that modules hold at rest."""
        return False

    def follow_training(self, unit: Unit) -> None:
        """Give full and exposed parameters the ``requires_grad`` that a user has set on either."""
        return

    def follow_places(self) -> None:
        """Move the exposed parameters to the current placements of their slots."""
        return

    def forget_places(self) -> None:
        """Look up the modules that use the slots again."""
        return

    def let_go(self, unit: Unit) -> None:
        """Allow torch to swap the tensors of the parameters, until `take_over`."""
        return

    def take_over(self, unit: Unit) -> None:
        """Take over what modules hold now: other values, dtypes, devices or parameter objects."""
        return

    def shard_of(self, group: ParameterGroup) -> nn.Parameter | None:
        """Return the shard of ``group`` as an extra parameter, whose gradient is set from now on
        too; None where the exposed parameter is flat already.
        """
        return None

    def parts_of(
        self, group: ParameterGroup, flat: nn.Parameter, line: torch.Tensor
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """List the parameters of ``group``, whose shard is ``flat``, with their parts of ``line``.

        Empty if ``flat`` is not that shard.
        """
        return []


class Unit:
    """Parameters that are gathered together and whose gradients are reduced together."""

    def __init__(
        self,
        name: str,
        groups: Sequence[ParameterGroup],
        exposure: Exposure,
        settings: UnitSettings,
    ) -> None:
        self.name = name
        self.groups = tuple(groups)
        self.slots = [slot for group in self.groups for slot in group.slots]
        """Its parameters, group by group."""
        axes = (axis for group in self.groups for axis in group.axes.reached)
        self.communicators: tuple[Communicator, ...] = tuple(dict.fromkeys(axes))
        """The axes that its gradients are summed over, here or by an exchange of samples."""
        self.sums = max(1, *(len(group.axes.communicators) for group in self.groups))
        """The most sums of a gradient, one after the other."""
        self.exposure = exposure
        self.settings = settings
        self.is_reducing = False
        """True while a reduction has been started and not finished."""
        self.announce: Callable[[Unit, str], None] | None = None
        """Called before collectives: "unshard", "reduce", "reduce_further"."""
        self.changes = 0
        """The number of times that parameters were converted, loaded or replaced."""
        self.phase = Phase.SHARDED
        """The phase of the parameters; see above for what may follow which."""
        self._is_followed = False
        """True once the second of two sums has been started, and where none comes."""
        self._replicates = any(group.axes.replicate is not None for group in self.groups)
        self._waits = False  # with gradients, for a later pass
        self.streams: UnitStreams | None = None
        """None on the host."""
        self._is_there: DeviceEvent | None = None
        """The end of the gather under way, on its stream."""
        self._last: SideStream | None = None
        """The stream on which the sums under way end."""
        self._is_summed: DeviceEvent | None = None
        """The first sums have been made: nothing reads whole gradients any more."""
        self._gathers: list[Pending] = []
        self._sums: list[Pending] = []
        """Under way."""
        self._packs: dict[PackKey, GatherPack] = {}
        """Made so far, by `FlatBuffer.pack_key`, on devices."""
        self._packed: list[GatherPack] = []
        """On their way."""
        self.trainable_groups: tuple[ParameterGroup, ...] = ()
        """The groups in which a parameter requires grad, as of when they were last whole."""
        self._hidden: tuple[Sequence[torch.Tensor], Sequence[int]] = (), ()
        """Parameters whose memory is gone, with their versions; graphs find others meanwhile."""
        self.is_at_rest = False
        """True while modules show sharded parameters though the whole ones are kept."""
        self.find_trainable()
        self.exposure.show_sharded(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.phase})"

    def change(self, **settings: Any) -> None:
        """Change some settings; keywords are the fields of `UnitSettings`."""
        self.settings = replace(self.settings, **settings)

    @contextlib.contextmanager
    def changed(self, **settings: Any) -> Iterator[None]:
        """Change some settings inside the block; all settings are restored after it."""
        before = self.settings
        self.change(**settings)
        try:
            yield
        finally:
            self.settings = before

    def rename(self, name: str, modules: Mapping[nn.Module, str]) -> None:
        """Take ``name``, and name parameters by the full names of their ``modules``."""
        self.name = name
        for slot in self.slots:
            slot.rename(modules)

    # ------------------------------------------------------------------------ parameters

    def unshard(self, *, is_late: bool = False) -> None:
        """Start to gather the parameters; does nothing when they are full or being gathered.

        On a device a gather that ``is_late`` does not wait for the previous unit to be freed.
        """
        if self.is_at_rest:  # a caller that saw them may have written to them
            self.reshard()
        if self.phase in (Phase.FULL, Phase.GATHERING):
            if self.phase is Phase.GATHERING or not any(map(_IS_STALE, self.groups)):
                return
            self.phase = Phase.SHARDED
            if self.streams is not None:  # which writes where the computation may still read
                self.streams.gathers.follow()
        if self.announce is not None:
            self.announce(self, "unshard")
        self.phase = Phase.GATHERING
        label, custom, started = f"unshard {self.name}", self.settings.all_gather, self._gathers
        streams = self.streams
        with HERE if streams is None else streams.gathering(self.groups, is_late=is_late):
            found: list[Moves] = []
            packed: set[FlatBuffer] = set()
            if streams is not None and len(self.groups) > 1 and custom is None:
                self._packed = self._find_packs()
                for pack in self._packed:
                    packed.update(pack.buffers)
                    found.append(pack.gather())
            for group in self.groups:
                if group.buffer in packed:
                    continue
                moves = group.buffer.gather(label, started, custom)
                if moves is not None:
                    found.append(moves)
            for ranks, outputs, tensors in found if len(found) < 2 else Moves.joined(found):
                started.append(ranks.all_gather_coalesced(outputs, tensors, label=label))
        if streams is not None:
            self._is_there = streams.gathers.mark()

    def wait_unshard(self) -> None:
        """Wait for the parameters and put them into the modules."""
        if self.phase is Phase.FULL:
            return
        if self.phase is not Phase.GATHERING:
            self.unshard()
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        if self._is_there is not None:
            self._is_there.wait()
        if self._hidden[0]:  # graphs may read what they have saved again
            set_versions(*self._hidden)
            self._hidden = (), ()
        # Staging memory goes back to the stream of gathers, which must not write there before the
        # copies from it have run on this one.
        before_freeing = None if self.streams is None else self.streams.gathers.follow
        while self._packed and before_freeing is not None:
            self._packed.pop().finish(before_freeing)
        for group in self.groups:
            group.buffer.finish_gather(before_freeing)
            if group.is_extended:
                group.take_wholes()
            group.versions = [*map(version_of, map(_LEAF, group.slots))]
        self.phase = Phase.FULL
        self.exposure.show_full(self)
        self.trainable_groups = tuple(filter(_IS_TRAINABLE, self.groups))

    def show_at_rest(self, is_shown: bool) -> None:
        """Put the sharded parameters into modules while full ones are kept, or the full ones."""
        if self.phase is Phase.FULL and self.is_at_rest is not is_shown:
            self.is_at_rest = is_shown
            (self.exposure.show_sharded if is_shown else self.exposure.show_full)(self)

    def forget_block(self) -> None:
        """Gather over all ranks the next time."""
        for group in self.groups:
            group.buffer.forget_kept()

    def reshard(self, *, for_backward: bool = False) -> bool:
        """Put the sharded parameters into the modules and free the full ones.

        With ``for_backward`` a copy among the ranks of `UnitSettings.block`, if any, is kept. True
        where one is: `forget_block` is due when the backward does not come.
        """
        settings = self.settings
        keeps = for_backward and settings.block is not None and self.phase is Phase.FULL
        if settings.block is not None:
            for group in self.groups:
                if keeps:
                    group.buffer.keep(settings.block)
                else:
                    group.buffer.forget_kept()
        if self.phase in (Phase.SHARDED, Phase.REDUCING):
            return False
        if self.phase is Phase.GATHERING:
            self.wait_unshard()
        self.is_at_rest = False
        self.exposure.show_sharded(self)
        leaves: list[torch.Tensor] = []
        lost = ""
        for group in self.groups:
            name = group.take_written()
            lost = lost or name
            if settings.unshard_in_backward and group.buffer.is_copy and not group.is_extended:
                leaves += map(_LEAF, group.slots)
        if settings.unshard_in_backward:
            # A backward that no hook announces may get here before the unit is gathered again: a
            # higher version has torch reject what graphs have saved, and not read freed memory.
            self._hidden = leaves, [*map(version_of, leaves)]
            increment_version(leaves)
        if self.streams is None:
            for group in self.groups:
                group.buffer.release()
        else:
            self.streams.leave(self.groups)
        self.phase = Phase.REDUCING if self.is_reducing else Phase.SHARDED
        if lost:
            raise written(lost, self.communicators)
        return keeps

    def has_changed(self) -> None:
        """Note that parameters were converted, loaded, stepped or replaced: graphs are invalid."""
        self.changes += 1
        self._hidden = (), ()
        self._packs.clear()  # they keep the shards of buffers that may have been replaced

    def find_trainable(self) -> None:
        """Update which groups have a parameter that requires grad now."""
        self.trainable_groups = tuple(filter(_IS_TRAINABLE, self.groups))

    # ------------------------------------------------------------------------- gradients

    @property
    def has_gradient(self) -> bool:
        """True when whole gradients of this rank wait for a reduction."""
        for group in self.groups:
            if have_gradients(group.slots):
                return True
            if not self.is_reducing and group.lines[0].has_gradient:
                return True
        return False

    @property
    def found_non_finite(self) -> list[str]:
        """Parameters whose gradient on this rank was not finite, in the last reduction."""
        return [name for group in reversed(self.groups) for name in group.non_finite.names()]

    def keep_gradients(self) -> None:
        """Leave gradients whole on this rank; they are added up in the dtype of the reduction."""
        self._waits = True
        for group in self.groups:
            if group.types.compute != group.types.reduce:
                group.accumulate()

    def take_unseen(self) -> str:
        """Drop a gradient from a pass that no hook announced; returns the parameter's name."""
        if self._waits:
            return ""
        left = [s for g in self.groups if have_gradients(g.slots) for s in g.slots]
        found = [slot for slot in left if slot.leaf.grad is not None or slot.full.grad is not None]
        for slot in found:
            slot.leaf.grad = slot.full.grad = None
        return found[0].name if found else ""

    def forget_gradients(self) -> None:
        """Drop gradients that wait for a reduction; one that is in flight continues."""
        for group in self.groups if not self.is_reducing else ():
            group.forget_gradients()

    def reduce(self) -> None:
        """Start to sum gradients over the ranks; parameters unused on this rank count as zero."""
        if self.is_reducing:
            raise InternalError(f"unit {self.name!r} reduces twice at a time")
        if self.announce is not None:
            self.announce(self, "reduce")
        self.is_reducing, self._waits = True, False
        name, settings, started = self.name, self.settings, self._sums
        found: list[Moves] = []
        for group in self.trainable_groups:
            moves = group.reduce(name, settings, started, is_late=self.streams is not None)
            if moves is not None:
                found.append(moves)
        streams = self.streams
        if streams is not None:
            # The sums read gradients that the computation has been given to write.
            streams.sums.follow()
        with HERE if streams is None else streams.sums.used():
            for ranks, outputs, tensors in found if len(found) < 2 else Moves.joined(found):
                label = f"reduce {name}"
                started.append(ranks.reduce_scatter_coalesced(outputs, tensors, label=label))
        # A wait for a sum that nothing follows would keep the host from what overlaps it.
        self._is_followed = streams is None and not self._replicates

    def reduce_further(self) -> None:
        """Start the second of two sums, when there is one; it waits for the first."""
        if self.is_reducing and not self._is_followed:
            self._is_followed = True
            if self.announce is not None and self._sums_twice:
                self.announce(self, "reduce_further")
            streams, last = self.streams, None
            if streams is not None:
                last = self._last = streams.further if self._sums_twice else streams.sums
                # Without a first sum the computation has written what is summed: `sums` follows it.
                last.wait_for(streams.sums.mark())
            with HERE if last is None else last.used():
                _wait_for(self._sums)
                # The only sum of a group that is not sharded is the second, which begins below.
                if last is not None and all(g.axes.shard for g in self.trainable_groups):
                    self._is_summed = last.mark()
                for group in self.trainable_groups:
                    group.reduce_further(self.name, self.settings, self._sums)

    def finish_reduce(self) -> None:
        """Wait for the sums; the means are kept until `deliver`."""
        if not self.is_reducing:
            return
        if not self._is_followed:
            self.reduce_further()
        if self._last is None:
            for pending in self._sums:
                pending.wait()
            self._sums.clear()
            for group in self.trainable_groups:
                group.finish_reduce(self.settings)
        else:
            self._finish_on(self._last)
        self.is_reducing = False
        if self.phase is Phase.REDUCING:
            self.phase = Phase.SHARDED

    def _finish_on(self, stream: SideStream) -> None:
        """Make the means on ``stream``; the computation waits for all reads of the gradients."""
        with stream.used():
            _wait_for(self._sums)
            groups = self.trainable_groups
            # Held until the wait below, as `ParameterGroup.finish_reduce` asks.
            held = [(g.finish_reduce(self.settings, is_late=True), g) for g in groups]
        # Tensors that are dropped here may go back to the stream of the computation, which then
        # has to wait for their last use; otherwise the end of the first sums is enough.
        spent = any(
            each is not group.mean for used, group in held for each in used if each is not None
        )
        is_summed, self._is_summed = self._is_summed, None
        (stream.mark() if spent or is_summed is None else is_summed).wait()
        for group in self.trainable_groups:
            group.release_gradients()

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in the memory of the full parameters."""
        if not has_storage(tensor) or tensor.layout is not torch.strided:
            return False
        address = tensor.data_ptr()
        return any(group.buffer.lends(address) for group in self.groups)

    def drop(self) -> None:
        """Abandon an iteration that raised; afterwards nothing is in flight and all is sharded."""
        if self.phase is Phase.GATHERING:
            self.wait_unshard()
        _wait_for(self._sums)
        if self.streams is not None:
            self.streams.stop()
        for group in self.groups:
            group.drop()
        self.is_reducing = self._waits = False
        if self.phase is Phase.REDUCING:
            self.phase = Phase.SHARDED
        self.reshard()

    # --------------------------------------------------------------------------- private

    def _find_packs(self) -> list[GatherPack]:
        """Group the current buffers that one gather can fill."""
        alike: dict[PackKey, list[FlatBuffer]] = {}
        for group in self.groups:
            key = None if group.is_extended else group.buffer.pack_key
            if key is not None:
                alike.setdefault(key, []).append(group.buffer)
        found = {key: buffers for key, buffers in alike.items() if len(buffers) > 1}
        for key, buffers in found.items():
            if key not in self._packs or self._packs[key].buffers != buffers:
                self._packs[key] = GatherPack(key, buffers)
        return [self._packs[key] for key in found]

    @property
    def _sums_twice(self) -> bool:
        settings = self.settings
        return self._replicates and settings.all_reduce and settings.reduce_hook is None


def _wait_for(started: list[Pending]) -> None:
    for pending in started:
        pending.wait()
    started.clear()


def zero_kept(units: Iterable[Unit], *, set_to_none: bool) -> None:
    """Zero the gradients of ``units``, also where modules list whole parameters now."""
    for unit in units:
        for parameter in unit.exposure.parameters(unit):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


class UnitStreams:
    """The streams of a device on which the units of one root are gathered and reduced.

    ::

        compute   unit 1 ─────────┐unit 2 ─────────┐unit 3           waits for what it reads
        gathers   gather of 2     │gather of 3     │gather of 4      wait for the unit whose memory
                  (beside unit 1) └> gives back 1  └> gives back 2   they take, by events
        sums      gradients of 5    gradients of 4                   means are made here, too
        further   second sum of 6   second sum of 5                  of hybrid sharding

    Memory is returned to the stream that it came from, once that stream waits for all its users.
    The host may be steps ahead: the order of work on the device bounds the memory of whole units.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gathers = SideStream(device)
        self.sums = SideStream(device)
        self.further = SideStream(device)
        """For sums over ``replicate`` that follow those over ``shard``."""
        self._all = self.gathers, self.sums, self.further
        self._computation = [current_stream(device)]
        """The stream that the last pass began on, in a list: `_leave` must not hold this object."""
        end = weakref.finalize(self, _leave, device, self._computation, self._all, os.getpid())
        # At exit nothing takes the memory again, and the device may be gone.
        end.atexit = False  # pyrefly: ignore[missing-attribute]
        self._left: deque[tuple[DeviceEvent, Sequence[ParameterGroup], list[FlatBuffer]]] = deque()
        """Units to free once these events have passed, with the buffers whose memory that is: a
        group may have been given another buffer since."""
        self._is_running = False
        """True where shards are as they were when `begin` was called."""

    def begin(self) -> None:
        """Begin a pass: gathers wait for the writes to the shards so far, and for no later ones."""
        self._give_back(0)
        self.gathers.follow()
        self._computation[0] = current_stream(self._device)
        self._is_running = True

    def end(self) -> None:
        """End what `begin` has begun, and free all units that were given to `leave`."""
        self._give_back(0)
        self._is_running = False

    @contextlib.contextmanager
    def gathering(self, groups: Sequence[ParameterGroup], *, is_late: bool) -> Iterator[None]:
        """Gather ``groups`` in the block, in the memory of units that were freed before.

        If ``is_late``, it overlaps the computation of the previous unit, which keeps its memory.
        """
        if not self._is_running:
            self.gathers.follow()
        # Gathered again before it was freed: its memory stays, and is written after its last use.
        for left in [left for left in self._left if left[1] is groups]:
            self._left.remove(left)
            self.gathers.wait_for(left[0])
        self._give_back(1 if is_late else 0)
        with self.gathers.used():
            yield

    def leave(self, groups: Sequence[ParameterGroup]) -> None:
        """Free the full parameters of ``groups`` after the work enqueued so far."""
        self._left.append((record(self._device), groups, [group.buffer for group in groups]))
        # In a pass the next gather gives memory back; outside of one none may come.
        if not self._is_running:
            self._give_back(0)

    def stop(self) -> None:
        """Make all streams wait for each other, so that later work may use any memory."""
        _join(self._all)
        self.end()

    def deliver(self, *, to_host: bool) -> None:
        """Make the computation wait for all sums; the host too, for means in host memory."""
        for stream in (self.sums, self.further):
            event = stream.mark()
            event.wait()
            if to_host:
                event.synchronize()

    def _give_back(self, keeps: int) -> None:
        while len(self._left) > keeps:
            event, _, buffers = self._left.popleft()
            self.gathers.wait_for(event)
            for buffer in buffers:
                buffer.release()


def _join(streams: Sequence[SideStream]) -> None:
    """Make ``streams`` and the current one wait for each other."""
    for stream in streams:
        stream.mark().wait()
    for stream in streams:
        stream.follow()


def _leave(
    device: torch.device, computations: Sequence[object], streams: Sequence[SideStream], pid: int
) -> None:
    """Finalizer: joins the ``streams`` of a root that dies within a pass, before its memory goes.

    Does nothing in a forked process, which must not use the device.
    """
    (computation,) = computations
    if pid == os.getpid() and not captures(device, computation):
        with torch.get_device_module(device).stream(computation):
            _join(streams)
