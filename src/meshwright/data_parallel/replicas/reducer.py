"""Reduces the gradients of a model over one axis: hooks count arrivals and launch full buckets.

A backward pass, step by step:

1. The hook of an output (or the first gradient) opens it and queues a callback for its end.
2. Each gradient counts its bucket down. A full bucket is launched once all before it have been, so
   the launch order is the same on every rank, in whatever order gradients arrive.
3. At the end the remaining buckets are launched, with zeros for unused parameters, and the reducer
   waits for all of them.

::

    phase      may become
    IDLE       BACKWARD (1.)
    BACKWARD   IDLE     (3., or when a pass that raised is abandoned)
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence, Set
from enum import StrEnum
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.dtensors.exchanging import NO_EXPERTS, ExpertRanks
from meshwright.comm.graphs.untraced import apart
from meshwright.comm.groups.registry import PROCESS
from meshwright.data_parallel.checks.alignment import (
    MARKS,
    NOWHERE,
    Alignment,
    PassPlace,
    agree,
    on_any,
    sum_notes,
)
from meshwright.data_parallel.checks.starting_state import compare_parameters
from meshwright.data_parallel.distributed_parameters import (
    ARRIVED,
    LocalParameter,
    ReadyCounters,
    ReducedLeaves,
)
from meshwright.data_parallel.replicas.bucket_layout import BucketLayout, plan_buckets, slot_of
from meshwright.data_parallel.replicas.buckets import (
    Reduction,
    build_reductions,
    came_empty,
)
from meshwright.data_parallel.replicas.gradient_bucket import (
    CommunicationHook,
    Deferred,
    RegisteredHook,
)
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.static_graph import late_gradient, unexpected_gradient
from meshwright.errors import NonFiniteError
from meshwright.gradients import Factor
from meshwright.torch_internals.autograd import at_end_of_backward

if TYPE_CHECKING:
    from meshwright.data_parallel.replicas.traced import Marking


_KIND = attrgetter("requires_grad", "dtype")


class ReductionPhase(StrEnum):
    """The phase of a reducer: in a backward pass, or between passes."""

    IDLE = "idle"
    BACKWARD = "backward"


class GradientReducer:
    """Makes ``.grad`` of every trainable parameter the mean over the ranks of ``communicator``.

    Buckets of experts are reduced over the ranks that hold the same ones. Buckets have one order on
    all ranks, whatever they are reduced over.

    Parameters are numbered by their position in ``named``. Those that do not require grad have no
    place in a bucket; they get one in the first forward pass that finds them trainable. For
    DTensors this rank's part is reduced; ``local`` says how they compute, by their ``id``.
    """

    def __init__(
        self,
        communicator: Communicator,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ReductionSettings,
        local: Mapping[int, LocalParameter] = MappingProxyType({}),
    ) -> None:
        self.communicator = communicator
        self.is_wanted = True
        """True when forward passes from now on lead to a reduction."""
        self.is_synchronizing = True
        """True when the next backward pass reduces, as was wanted when its forward pass began."""
        self.phase = ReductionPhase.IDLE
        self.scale: Callable[[], Factor] | None = None
        """Multiplies gradients on the way into the buckets, instead of 1/ranks. It is called once
        for each backward pass that reduces, just before the first bucket."""
        self.on_reduction: Callable[[], float | None] | None = None
        """Called before the first bucket of a pass; may return the factor of the mean."""
        self.registered_hook: RegisteredHook | None = None
        self.marking: Marking | None = None
        """The marks of gradients while a backward pass is traced."""
        self._counters = ReadyCounters()
        self._next = 0
        self._factor: Factor | None = None
        self.late = LateNumbers()
        """The notes of the pass before, until the device has summed them."""
        self._unread: list[Callable[[], object]] = []
        """Answers of the last exchange of use flags that this rank did not need."""
        self._tells = self._lacks = self._has_told = False
        """True when ranks exchange which gradients they have, since one has lacked some; when this
        pass lacks one; when they were exchanged in this pass."""
        self.leaves = ReducedLeaves((), {})
        self.reduced: frozenset[int] = frozenset()
        """The ``id`` of each parameter that is reduced."""
        PROCESS.reducers[self] = None
        self.take_up(named, settings, local)

    def take_up(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ReductionSettings,
        local: Mapping[int, LocalParameter],
    ) -> None:
        """Reduce the gradients of ``named`` from now on, instead of those so far.

        All ranks do it before the same pass. Facts from earlier passes, such as which parameters
        are used, are forgotten.
        """
        self.leaves.release()
        self.settings = settings
        self.named = tuple(named)
        parameters = [parameter for _, parameter in named]
        self.leaves = ReducedLeaves(parameters, local)
        found = [(key, each.experts) for key, each in local.items()]
        experts: Mapping[int, ExpertRanks] = {key: each for key, each in found if each is not None}
        self.experts = experts or NO_EXPERTS
        """The ranks of experts, by the ``id`` of their parameters."""
        holders = (each.holders for each in self.experts.values())
        self._communicators = tuple(dict.fromkeys((self.communicator, *holders)))
        """What buckets are reduced over, by their group."""
        if self.registered_hook is not None:
            self._check_hook()
        self.alignment = Alignment(self.named, settings, self.communicator, self.experts)
        self._static = self.alignment.static
        self._unused: frozenset[int] | None = None
        """Parameters that no rank used in the first reduction, when they are to be skipped."""
        self._arrange()

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The buckets, in the order in which they are reduced."""
        return tuple(bucket.layout for bucket in self.buckets)

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """List all gradients in as few tensors as possible: buckets where ``.grad`` is a view.

        A sparse gradient gives its values. Not for DTensors, which hold their own gradients.
        """
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors())

    @property
    def found_non_finite(self) -> list[str]:
        """Parameters whose gradient on this rank was not finite in the last backward pass."""
        values = self.alignment.values
        return [] if values is None else values.names()

    def register_hook(self, state: object, hook: CommunicationHook) -> None:
        """Have ``hook`` reduce the buckets from now on, see `GradBucket`; it also divides the sums.

        Raises RuntimeError in a backward pass, and for sparse gradients that the hook cannot send.
        """
        if self.phase is not ReductionPhase.IDLE:
            raise RuntimeError("register_comm_hook inside a backward pass: call it before forward")
        if self.settings.sparse and getattr(hook, "is_for_dense", False):
            raise RuntimeError(
                f"parameters {', '.join(sorted(self.settings.sparse))} have sparse gradients, "
                "which this communication hook cannot send: build their embeddings with "
                "sparse=False, or take allreduce_hook or a hook for half precision"
            )
        self._check_hook()
        self.registered_hook = RegisteredHook(hook=hook, state=state)
        self._arrange()

    def _check_hook(self) -> None:
        for name, parameter in self.named if self.experts else ():
            if id(parameter) in self.experts:
                raise ValueError(
                    f"register_comm_hook: {name!r} is a parameter of experts, whose gradients are "
                    "sums over other ranks already, and are reduced over those that hold the same: "
                    "leave the hook out"
                )

    def begin_forward(self) -> None:
        """Prepare for the gradients of a forward pass that has just begun.

        Plans buckets again, a collective, if other parameters train or dtypes have changed.
        """
        self.is_synchronizing, self._counters.is_open = self.is_wanted, False
        if self.marking is not None and not self.is_wanted:
            self.marking.keep()
        self.alignment.begin_forward()
        if self.leaves.lent:
            self.follow_leaves()
        kinds = list(map(_KIND, self._parameters))
        device = self._parameters[0].device if kinds else None  # modules move as a whole
        if kinds == self._kinds and device == self._device:
            return
        reason = ": the module was converted"
        for (name, _), (trains, _), (before, _) in zip(self.named, kinds, self._kinds, strict=True):
            if trains != before:
                reason = f": {name} {'trains' if trains else 'is frozen'} now"
                break
        compare_parameters(self.communicator, self.named, self.settings.sparse, reason=reason)
        self._arrange()

    def follow_leaves(self) -> None:
        """Update the leaves of DTensors, and hook what trains; not collective, for traces."""
        if self.leaves.lent and self.leaves.follow():
            self._arrange()
        self.leaves.hook_trainable(self._counters, self._arrived, self._arrived_at_leaf)

    def synchronize(self, is_due: bool) -> None:
        """Set whether hooks of the current pass reduce gradients."""
        self.is_synchronizing, self._counters.is_open = is_due, False

    def begin_backward(self, *, is_running: bool = True) -> None:
        """Open a backward pass, unless one is open; call this inside of it if it ``is_running``."""
        if is_running and (self.phase is ReductionPhase.BACKWARD or not self.is_synchronizing):
            return
        if self.late.coming:
            self.late.settle()  # before any of this pass is sent
        if not self.reduced:
            return
        for other in reducers_in_backward(self.reduced):
            rows = zip(self.named, self._parameters, strict=True)
            names = [name for (name, _), each in rows if id(each) in other.reduced]
            raise RuntimeError(
                "expected one replica to reduce a parameter in a backward, found two that reduce "
                f"{', '.join(map(repr, names[:3]))}: the second would take half a sum for a "
                "gradient. Call backward for the loss of each replica by itself, or wrap one "
                "module that holds both"
            )
        self.phase = ReductionPhase.BACKWARD
        self._counters.is_open = self.is_synchronizing
        if self.marking is not None and self.marking.has_begun:
            self.marking.has_begun = False  # a traced forward pass, which no hook has seen
            self.alignment.begin_forward()
        hook = self.registered_hook
        self.alignment.begin_backward(parts_copies=hook is not None and hook.parts_copies)
        if self.leaves.lent:
            self.leaves.lend()
        for gradient in self._large:
            gradient.begin()
        if is_running:
            at_end_of_backward(self.finish)

    def start(self) -> None:
        """Start to reduce the current ``.grad``, outside of a backward pass; `finish` ends it."""
        if self._static is not None:
            self._static.skip()
        self.begin_backward(is_running=False)
        while self._next < len(self.buckets):
            self._launch_next()

    def abandon(self) -> None:
        """Close a backward pass that raised, if one did, so that the next one starts clean.

        This rank launches its remaining reductions as void. Peers that raised elsewhere have issued
        the same reductions then, and peers that did not raise get an error, never a mean that lacks
        a rank.
        """
        if self.phase is ReductionPhase.IDLE:
            return
        is_void = self._next < len(self.buckets)
        self._stand_in(is_void=is_void)
        said = None if self._is_local or not is_void else self._extra
        if said is not None and not agree([abs(mark) for mark in said[:MARKS].tolist()]):
            self.alignment.refuse(gave_up=True)
        self.reset()

    @torch.no_grad()
    def _stand_in(self, *, is_void: bool) -> None:
        """Take part in the remaining reductions and drop their results."""
        while self._next < len(self.buckets):
            self._launch_next(is_void=is_void)
        self._tell(is_void=is_void)
        for bucket in self._by_end:
            bucket.drop()
        self._share_notes()

    def shadow(self) -> None:
        """Take part in the reductions of a backward pass that this rank does not have."""
        self.late.settle()
        self._stand_in(is_void=False)
        self._next, self._has_told = 0, False
        error = self._judge(is_own=False)
        if self.settings.skips_unused:
            self._skip_unused()
        if error is not None:
            raise error

    def _arrange(self) -> None:
        """Give every parameter that requires grad now its place in a bucket."""
        self._parameters = self.leaves.parameters
        self._kinds = list(map(_KIND, self._parameters))
        self._device = self._parameters[0].device if self._parameters else None
        skipped = self._unused or frozenset()
        settings = self.settings
        may_be_alone = not settings.is_gradient_view and self.registered_hook is None
        names = [name for name, _ in self.named]
        slots = [
            slot_of(
                index, names, each, settings, may_be_alone=may_be_alone, **self._group_of(index)
            )
            for index, each in enumerate(self._parameters)
            if each.requires_grad and index not in skipped
        ]
        self.reduced = frozenset([id(self._parameters[slot.index]) for slot in slots])
        layouts = plan_buckets(
            slots,
            first_bytes=settings.first_bytes,
            cap_bytes=settings.cap_bytes,
            listed_bytes=settings.listed_bytes,
            extra_notes=self.alignment.numel if slots else 0,
            is_packed=not self.communicator.is_on_host,
        )
        hook = self.registered_hook
        self.buckets = build_reductions(
            layouts, self._parameters, settings, self._communicators, hook
        )
        self._by_end: Sequence[Reduction] = self.buckets
        """The buckets in the order in which they end: a hook gets sparse ones only then."""
        if hook is not None:
            self._by_end = sorted(self.buckets, key=lambda bucket: bucket.layout.is_sparse)
        self._extra = self.buckets[-1].extra if self.buckets else None
        """The numbers after the gradients by which all ranks know of each other's passes."""
        self._large = [bucket for bucket in self.buckets if bucket.layout.is_alone]
        self._homes: list[tuple[Reduction, int] | None] = [None] * len(self._parameters)
        counted: list[tuple[bytearray, int, int] | None] = [None] * len(self._parameters)
        for number, bucket in enumerate(self.buckets):
            for place, slot in enumerate(bucket.layout.slots):
                self._homes[slot.index] = (bucket, place)
                if self._static is None and not bucket.takes[place]:
                    counted[slot.index] = (bucket.arrived, place, number)
        for index in self.leaves.lent:
            counted[index] = None
        self._counters.homes = counted
        self._counters.missing = [len(bucket.parameters) for bucket in self.buckets]
        self._counters.is_open = False
        self.leaves.hook_trainable(self._counters, self._arrived, self._arrived_at_leaf)

    def _group_of(self, index: int) -> dict[str, int]:
        """The group of parameter ``index``, and the elements of its largest part."""
        parameter = self.named[index][1]
        experts = self.experts.get(id(parameter))
        if experts is None:
            return {}
        rows = -(-len(parameter) // experts.exchange.size)
        most = rows * math.prod(parameter.shape[1:])
        return {"group": self._communicators.index(experts.holders), "most": most}

    @apart
    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        """Hook of a complete gradient: counts it and launches full buckets."""
        if torch.compiler.is_compiling():
            if self.marking is not None:
                self.marking.accumulated(index, parameter)
            return
        home = self._homes[index]
        if not self.is_synchronizing:
            if not self.is_wanted and self.communicator.size > 1:
                self.alignment.stays_local(index)
            if self.marking is not None:
                self.marking.stays()
            return
        is_idle = self.phase is ReductionPhase.IDLE
        if is_idle and reducers_in_backward({id(parameter)}):
            return  # the backward of another replica, which reduces it
        if home is None:
            if self._unused is not None and index in self._unused:
                raise unexpected_gradient(self.named[index][0], rank=self._rank)
            return
        if is_idle:
            self.begin_backward()
        bucket, place = home
        if self._static is not None and not self._static.arrived(index):
            return
        if bucket.arrived[place]:
            if bucket.layout.index < self._next or bucket.taken[place]:
                raise late_gradient(bucket, place, self.buckets, rank=self._rank)
            return
        if bucket.takes[place]:
            with torch.no_grad():
                bucket.take(place, self._current_factor(bucket.layout.group))
        bucket.arrived[place] = ARRIVED if parameter.grad is not None else came_empty(parameter)
        number, missing = bucket.layout.index, self._counters.missing
        missing[number] -= 1
        if missing[number] == 0 and number == self._next:
            # In the order of the buckets, whichever fills first: ranks pair reductions up by order.
            while self._next < len(self.buckets) and missing[self._next] == 0:
                self._launch_next()

    @apart
    def _arrived_at_leaf(self, index: int, leaf: torch.Tensor) -> None:
        """As `_arrived`, for the leaf of a DTensor; sets its gradient now if nothing is reduced."""
        if torch.compiler.is_compiling():
            if self.marking is not None:
                self.marking.accumulated_at_leaf(index, leaf)
            return
        if self.phase is ReductionPhase.IDLE and reducers_in_backward({id(leaf)}):
            return
        if self.is_synchronizing:
            self.begin_backward()
            self.leaves.collect(index)
        else:
            self.leaves.keep(index)
        self._arrived(index, leaf)

    def _current_factor(self, group: int) -> Factor:
        if self._factor is None:
            mean = 1.0 / self.communicator.size
            if self.on_reduction is not None:
                mean = self.on_reduction() or mean
            self._factor = mean if self.scale is None else self.scale()
            if self.registered_hook is not None:
                self._factor = self._factor * self.communicator.size  # which the hook divides by
        if not group:
            return self._factor
        # ExpertRanks are divided by the rest of all ranks as they come.
        return self._factor * (self.communicator.size / self._communicators[group].size)

    @torch.no_grad()
    def _launch_next(self, *, is_void: bool | None = None) -> None:
        """Start the next reduction; unless ``is_void`` is None, without gradients of this rank."""
        bucket = self.buckets[self._next]
        if is_void is not None:
            bucket.stand_in(is_void=is_void)
        else:
            bucket.fill(self._current_factor(bucket.layout.group))
            self._lacks = self._lacks or bucket.lacks
            if self.alignment.values is not None:
                bucket.look(self.alignment.values)
            if bucket.extra is not None:
                self.alignment.write(bucket.extra, lacks=self._lacks)
        is_hooked = self.registered_hook is not None and bucket.is_buffer
        if is_hooked and self._next and self.communicator.is_on_host:
            # Collectives of the hook before may go on in c10d's threads, in an order of their own.
            self.buckets[self._next - 1].await_hook(unless=Deferred)
        bucket.launch(self._communicators[bucket.layout.group])
        self._next += 1

    @torch.no_grad()
    @apart
    def finish(self) -> None:
        """Launch the remaining reductions, wait for all of them, and set ``.grad``.

        Ends a backward pass, or what `start` has begun. Raises the error of `_judge`, if any.
        """
        while self._next < len(self.buckets):
            self._launch_next()
        if self._tells:
            self._tell(is_void=False)
        for bucket in self._by_end:
            bucket.finish()
        if self.registered_hook is not None:
            reduced = self.alignment.reduced
            if reduced is not None:
                for bucket in self.buckets:
                    if bucket.is_buffer:
                        bucket.look(reduced)
            if self._extra is not None and reduced is not None:
                reduced.add_to(self._extra[-1])
            self._share_notes()
            for bucket in self.buckets:
                bucket.deliver()
        error = self._judge(is_own=True)
        if self._static is not None:
            self._static.end()
        if self.leaves.lent:
            self.leaves.give_back()
        self.reset()
        if self.settings.skips_unused:
            self._skip_unused()
        if error is not None:
            raise error

    def _tell(self, *, is_void: bool) -> None:
        """Tell the other ranks which gradients this one has; in a void pass, claim to have all.

        Only on a device, where reading the counts after the gradients would stall the host. A rank
        that lacks a gradient waits until the others have answered.
        """
        if not self._tells or self._has_told:
            return
        self._has_told = True
        while self._unread:
            self._unread.pop()()
        flags = [is_void or has for bucket in self.buckets for has in bucket.used()]
        used = iter(on_any(self.communicator, flags, self._unread))
        for bucket in self.buckets:
            bucket.known = [next(used) for _ in bucket.used()]

    def _skip_unused(self) -> None:
        """Leave out of later reductions what no rank has used in the first one."""
        if self._unused is not None or self._is_local:
            return
        found: set[int] = set()
        for bucket in self.buckets:
            found.update(bucket.unused())
        self._unused = frozenset(found)
        if found:
            self._arrange()

    def _share_notes(self) -> None:
        """Sum the notes separately where a communication hook has reduced the gradients alone."""
        if self.registered_hook is not None and not self._is_local:
            notes = [b.notes for b in self.buckets if b.notes is not None]
            sum_notes(notes, self.communicator)

    @property
    def _is_local(self) -> bool:
        """True when the communication hook keeps gradients on this rank."""
        return self.registered_hook is not None and self.registered_hook.is_local

    def _judge(self, *, is_own: bool) -> NonFiniteError | None:
        """Raise on every rank if any rank has marked this pass as void.

        Returns the error to raise after a pass with non-finite gradients. ``is_own`` says that all
        ranks have reduced a pass of their own.
        """
        notes, hook = self._extra, self.registered_hook
        is_local = hook is not None and hook.is_local
        if notes is None:
            return None
        place = self.alignment.place if is_own and not is_local else NOWHERE
        static = self._static
        differences = static.differences() if static is not None and static.deviates() else ""
        sums = notes.real if notes.is_complex() else notes
        self.late.look(sums, partial(self._refuse, self.alignment, place, differences))
        return self.alignment.refuse_non_finite(notes, is_local=is_local)

    def _refuse(
        self,
        alignment: Alignment,
        place: PassPlace,
        differences: str,
        sums: Sequence[float],
    ) -> None:
        """Raise for the pass that ``sums`` of notes belong to, if it is void."""
        is_late = not self.communicator.is_on_host
        self._tells = self._tells or (is_late and sums[MARKS] != 0 and not self._is_local)
        error = alignment.judge(place, differences, sums)
        if error is not None:
            self.reset()
            raise error

    def reset(self) -> None:
        """Close a backward pass, also one that all ranks give up before its first reduction."""
        for number, bucket in enumerate(self.buckets):
            bucket.reset()
            self._counters.missing[number] = len(bucket.parameters)
        self._counters.is_open = False
        self._next = 0
        self._factor = None
        self._lacks = self._has_told = False
        if self._static is not None:
            self._static.reset()
        self.phase = ReductionPhase.IDLE
        if self.leaves.lent:
            self.leaves.give_up()

    @property
    def _rank(self) -> int:
        return self.communicator.ranks[self.communicator.rank]


def reducers_in_backward(ids: Set[int]) -> list[GradientReducer]:
    """List the reducers, now in a backward, that reduce parameters with these ``ids``."""
    return [
        each
        for each in list(PROCESS.reducers)
        if each.phase is ReductionPhase.BACKWARD and not ids.isdisjoint(each.reduced)
    ]


def refuse_other_ranks(
    named: Sequence[tuple[str, torch.Tensor]], communicator: Communicator
) -> None:
    """Raise ValueError if a reducer over other ranks has one of the parameters ``named``."""
    names = {id(parameter): name for name, parameter in named}

    def common(reducer: GradientReducer) -> str:
        return next((names[id(p)] for p in reducer.leaves.parameters if id(p) in names), "")

    if any(map(common, list(PROCESS.reducers))):
        gc.collect()  # a wrapper that nobody holds must be gone on all ranks
    for reducer in list(PROCESS.reducers):
        name, ranks = common(reducer), sorted(reducer.communicator.ranks)
        if name and ranks != sorted(communicator.ranks):
            raise ValueError(
                f"replicate: expected parameters that no replica over other ranks has, found "
                f"{name!r}, which is reduced over ranks {ranks} and would be over "
                f"{sorted(communicator.ranks)} here: each would undo the mean of the other. "
                "Give both the same process group, or drop the other wrapper first"
            )
