"""The parameters of a unit that share one buffer, and the reduction of their gradients.

A `ParameterGroup` holds the slots of one dtype with their buffer, and accumulates, reduces and
scales their gradients. With its `FlatBuffer` it takes parameters and gradients

============  ============  ============================================================
from          to            by
============  ============  ============================================================
Shard         Replicate     all-gather into ``full``           (`FlatBuffer.gather`)
Replicate     Shard         slice                              (`FlatBuffer.fill`)
Partial       Shard         reduce-scatter of ``lines``        (`reduce`, axis ``shard``)
Partial       Replicate     all-reduce           (`reduce_further`, axis ``replicate``)
============  ============  ============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Literal

import torch
from torch import nn

from meshwright.comm import Communicator, Pending
from meshwright.comm.dtensors.dtensor import dtensor_at_rest, is_dtensor, local_gradient, local_of
from meshwright.comm.dtensors.local_leaves import take_over
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.data_parallel.checks.starting_state import has_values_of
from meshwright.data_parallel.shards.buffer import (
    BufferTypes,
    CustomCollective,
    DataAxes,
    FlatBuffer,
    Moves,
)
from meshwright.data_parallel.shards.gradient_lines import (
    GradientLine,
    KeptLine,
    Summand,
    sum_parts,
    summands_of,
)
from meshwright.data_parallel.shards.slot import Slot
from meshwright.data_parallel.shards.tensor_extensions import ExtendedBuffer, whole_parameter
from meshwright.errors import InternalError
from meshwright.gradients import Factor, NonFiniteValues, digests_of, multiply_
from meshwright.layout import LineLayout
from meshwright.torch_internals.tensors import version_of

_REQUIRES_GRAD = attrgetter("full.requires_grad")
_LEAF = attrgetter("leaf")
_OF_LEAF, _OF_WHOLE = attrgetter("leaf.grad"), attrgetter("full.grad")
_TENSOR = attrgetter("tensor")

ReduceHook = Callable[[torch.Tensor, torch.Tensor], None]
"""``hook(whole, out)``: reduces the whole line of gradients and writes this rank's part to ``out``
(both the same tensor where every rank holds the whole). It divides; nothing is scaled beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """The settings of a unit, replaced as a whole when one changes.

    An error names the first field in which ranks differ, so fields that users set come before
    derived ones.
    """

    synchronize: bool = True
    """True when a backward pass ends in a reduction; without one gradients stay whole, here."""
    all_reduce: bool = True
    """True when a reduction also runs over ``replicate``. Without one, sums wait in the shard."""
    keep_full_after_forward: bool = False
    keep_full_after_backward: bool = False
    block: Communicator | None = None
    """The ranks that full parameters are resharded over between forward and backward, if any."""
    unshard_in_backward: bool = True
    divide_factor: float | None = None
    """The divisor of summed gradients; the number of ranks when None."""
    scale: Callable[[], Factor] | None = None
    """Gives the factor of summed gradients instead; asked when a reduction ends."""
    is_watched: bool = False
    """Look for gradients that are not finite before they are mixed with those of other ranks."""
    reduce_hook: ReduceHook | None = None
    shard_hook: Callable[[torch.Tensor], None] | None = None
    """Called with each finished sum of this rank's part, before it becomes a gradient."""
    all_gather: CustomCollective | None = None
    """Gathers in place of ours."""
    reduce_scatter: CustomCollective | None = None
    """Sums over ``shard`` in place of ours."""
    forward_prefetch: bool = False
    """True when the unit that came next in the last iteration is gathered ahead in the forward."""
    backward_prefetch: Literal["before", "after"] | None = "before"
    """The time when the backward gathers ahead the unit that ran before: before this unit's
    gradients are computed, after that, or never."""


class ParameterGroup:
    """The parameters of a unit that share one buffer."""

    def __init__(
        self,
        slots: Sequence[Slot],
        layout: LineLayout,
        axes: DataAxes,
        types: BufferTypes,
        device: torch.device,
        home: torch.device | None = None,
        *,
        pin_memory: bool = True,
        marks_use: bool = False,
    ) -> None:
        self.slots = tuple(slots)
        self.axes = axes
        self.types = types
        self.home = home
        """The device of shards and gradients while the parameters compute on ``device``; None
        where that is the same."""
        self.pin_memory = pin_memory
        """True when shards on the CPU lie in pages that a GPU can copy from beside its work."""
        self._extensions = [each for slot in slots if (each := slot.extension) is not None]
        self.is_extended = bool(self._extensions)
        self.buffer = self._new_buffer(layout, device, self._empty_shard(layout, home))
        self.buffer.fill(
            [None if s.local is not None else values_of(local_of(s.original)) for s in slots]
        )
        self.has_outer = any(slot.outer is not None for slot in slots)
        """True where one of its parameters was a DTensor."""
        self._gradient_of: Callable[[Slot], torch.Tensor | None] = (
            _gathered if self.has_outer else _OF_LEAF
        )
        """Returns the gradient from autograd, this rank's part of a DTensor."""
        self.partial_sums = [
            (index, add)
            for index, slot in enumerate(slots)
            if (add := slot.computes.partial) is not None
        ]
        """By their index, parameters whose gradients are parts of sums over other axes."""
        for index, slot in enumerate(slots):
            if slot.local is not None:
                self.buffer.local(index).copy_(slot.local)
                slot.local = None
        self.versions = [0] * len(slots)
        """The version counters of the leaves when they were gathered."""
        self._show_views()
        self.used = [False] * len(slots)
        """By parameter, True when it had a gradient on this rank since the last reduction."""
        self.marks_use = marks_use
        """True where a sum has to tell if any rank had a gradient, see `is_unused`."""
        self.non_finite = NonFiniteValues()
        """This rank's own gradients that were not finite, in the last reductions watched."""
        self.partial: torch.Tensor | None = None
        """Sums over ``shard`` that have not been over ``replicate`` yet."""
        self.kept = KeptLine()
        """Memory for the mean."""
        self._reduced: torch.Tensor | None = None
        self._added: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        """Memory for a mean that is cast, allocated on the stream where users read it."""
        self._factor: Factor = 1.0
        self.in_hook: torch.Tensor | None = None
        """The whole gradients that a hook is summing now."""
        self.mean: torch.Tensor | None = None
        """This rank's part of the mean gradient, finished and not delivered yet."""

    @cached_property
    def lines(self) -> tuple[GradientLine, ...]:
        """The whole gradients, one line for each collective; without memory at rest.

        Made in the first pass, which may be an evaluation in inference mode: autograd could not use
        tensors of that later.
        """
        buffer = self.buffer
        with torch.inference_mode(False):
            return tuple(
                GradientLine(buffer.layout, piece, self.types.reduce, buffer.device)
                for piece in buffer.pieces
            )

    def release_gradients(self) -> None:
        """Free the memory of the whole gradients."""
        for line in self.lines:
            line.release()

    @torch.no_grad()
    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Start over with an empty shard of another dtype, on another device or in other memory."""
        self.accumulate()
        before = self.buffer
        self.types = BufferTypes.of(dtype, *self.types.asked)
        if self.home is None:
            self.buffer = self._new_buffer(before.layout, device)
        else:
            self.home = device
            shard = self._empty_shard(before.layout, device)
            self.buffer = self._new_buffer(before.layout, before.device, shard)
        self._carry_gradients()
        self._show_views()

    @torch.no_grad()
    def compute_in(self, compute: torch.dtype | None, reduce: torch.dtype | None) -> None:
        """Compute and reduce in other dtypes from now on; the shard stays the same object.

        None stands for the dtype of the shard, or of the computation.
        """
        self.accumulate()
        before = self.buffer
        self.types = BufferTypes.of(self.types.master, compute, reduce)
        self.buffer = self._new_buffer(before.layout, before.device, before.shard)
        self._carry_gradients()
        self._show_views()

    def note_starts(self, compared: Container[Slot]) -> None:
        """Store digests of the ``compared`` slots, and of this rank's parts of them.

        Call it while they still have their values.
        """
        chosen = [index for index, slot in enumerate(self.slots) if slot in compared]
        wholes = [self.slots[index].original for index in chosen]
        digests = digests_of([*wholes, *map(self.buffer.own, chosen)])
        pairs = zip(chosen, digests[: len(chosen)], digests[len(chosen) :], strict=True)
        known = [
            (i, whole, own) for i, whole, own in pairs if whole is not None and own is not None
        ]
        if not known:
            return
        # Rows of one tensor: the collector has few objects to go through for each unit.
        both = [each.to(own.device) for _, whole, own in known for each in (whole, own)]
        for (index, _, _), start in zip(known, torch.stack(both).view(-1, 2), strict=True):
            self.slots[index].start = start

    def carry_starts(self, parts: Sequence[torch.Tensor]) -> None:
        """Keep the digests of slots whose ``parts`` convert the current ones; drop the others."""
        for index, (slot, part) in enumerate(zip(self.slots, parts, strict=True)):
            found, slot.start = slot.start, None
            if found is None:
                continue
            before, after = self.buffer.own(index).view(-1), part.reshape(-1)
            own, now = digests_of([before, after])
            if own is None or now is None or not has_values_of(after, before):
                continue
            if torch.equal(own, found[1].to(own.device)):
                slot.start = torch.stack([found[0].to(now.device), now])

    def _carry_gradients(self) -> None:
        """Keep gradients that wait for a reduction, in the current dtype and on its device."""
        kind, device = self.types.reduce, self.buffer.device
        before: Sequence[GradientLine] = vars(self).pop("lines", ())
        for index, line in enumerate(before):
            if line.has_gradient:
                wholes = line.wholes([self.buffer.layout.shapes[n] for n in line.indices])
                self.lines[index].take([whole.to(device, kind) for whole in wholes])
        if self.partial is not None:
            self.partial = self.partial.to(device, kind)

    def _new_buffer(
        self,
        layout: LineLayout,
        device: torch.device,
        shard: torch.Tensor | None = None,
    ) -> FlatBuffer:
        arguments = layout, self.axes, self.types, device, shard
        if self._extensions:
            return ExtendedBuffer(self._extensions, *arguments)
        return FlatBuffer(*arguments)

    def take_wholes(self) -> None:
        """Take the whole parameters that extensions have made of what was gathered."""
        for slot, whole in zip(self.slots, self.buffer.wholes, strict=True):
            if slot.full is not whole:
                whole.requires_grad_(slot.full.requires_grad)
                slot.full = slot.leaf = whole

    def take_written(self) -> str:
        """Name a whole parameter that was written or moved in memory since the gather, "" for none.

        The change is dropped: all parameters are views of the buffer again.
        """
        before, self.versions = self.versions, [*map(version_of, map(_LEAF, self.slots))]
        lost = ""
        if before != self.versions and self.buffer.is_copy:
            pairs = zip(self.slots, before, self.versions, strict=True)
            lost = next(slot.name for slot, then, now in pairs if then != now)
        start, addresses = self._addresses
        if start != self.buffer.full.data_ptr():
            start = self.buffer.full.data_ptr()
            # `data_ptr` is 0 where there is no memory.
            addresses = [start + at if start and at is not None else 0 for at in self._distances]
            self._addresses = start, addresses
        found = [*map(torch.Tensor.data_ptr, self._wholes)]
        if found != addresses:
            for index, now, then in zip(self._in_line, found, addresses, strict=True):
                if now != then:
                    self.slots[index].leaf.data = self.buffer.view(index)
                    lost = lost or self.slots[index].name
        return lost

    def _empty_shard(self, layout: LineLayout, home: torch.device | None) -> torch.Tensor | None:
        if home is None:
            return None
        pins = self.pin_memory and home.type == "cpu" and torch.cuda.is_available()
        size, dtype = layout.shard_size, self.types.master
        return torch.zeros(size, dtype=dtype, device=home, pin_memory=pins)

    def _show_views(self) -> None:
        buffer = self.buffer
        self._wholes: list[torch.Tensor] = []
        """Parameters that lie whole in the line itself."""
        in_line: list[int] = []
        for index, slot in enumerate(self.slots):
            outer, view = slot.outer, buffer.view(index)
            if outer is None:
                slot.full = slot.leaf = whole_parameter(view, slot.original)
            else:
                # What reads it beside layers that tensor parallelism has sharded gets the DTensor:
                # a plain part would be taken for the whole.
                dtensor = dtensor_at_rest(
                    view, outer.mesh, outer.placements, outer.shape, outer.stride
                )
                slot.full = nn.Parameter(dtensor, requires_grad=slot.original.requires_grad)
                slot.leaf = take_over(slot.full) if slot.computes.is_local else slot.full
            if slot.extension is None and not is_dtensor(slot.leaf):
                in_line.append(index)
                self._wholes.append(slot.leaf)
        self._in_line = tuple(in_line)
        """The numbers of ``_wholes``."""
        self._distances = tuple(map(buffer.distance, in_line))
        self._addresses: tuple[int, list[int]] = (-1, [])
        buffer.release()

    @property
    def is_trainable(self) -> bool:
        """True when any of its parameters requires grad now."""
        return any(map(_REQUIRES_GRAD, self.slots))

    def forget_gradients(self) -> None:
        """Drop gradients from autograd and from passes without a reduction."""
        for slot in self.slots if have_gradients(self.slots) else ():
            slot.leaf.grad = slot.full.grad = None
        self.release_gradients()
        self.partial = None
        self.used = [False] * len(self.slots)

    def take_mean(self) -> torch.Tensor:
        """Hand over the mean that ``.grad`` is set to, before the shards change.

        A detached alias, not the buffer itself: `KeptLine` counts who still uses its memory.
        """
        if self.mean is None:
            raise InternalError(f"no mean of {self.slots[0].name!r} is finished")
        mean, self.mean = self.mean.detach(), None
        self.used = [False] * len(self.slots)
        self.buffer.gathered_version = -1
        return mean

    def accumulate(self) -> None:
        """Move the gradients that autograd has left on the parameters to the buffer."""
        gradients = [*map(self._gradient_of, self.slots)]
        if {*map(type, gradients)} <= {type(None)}:
            return
        if self._extensions:
            gradients = [None if g is None else values_of(g) for g in gradients]
        try:
            for line in self.lines:
                line.take(gradients[line.indices.start : line.indices.stop])
        except RuntimeError as error:
            self._refuse_sparse(gradients, error)
            raise
        used = self.used
        for index, slot in enumerate(self.slots):
            if gradients[index] is not None:
                used[index] = True
                slot.leaf.grad = None

    def _refuse_sparse(
        self, gradients: Iterable[torch.Tensor | None], error: RuntimeError | None = None
    ) -> None:
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"expected a dense gradient of sharded parameter {slot.name!r}, found one of "
                    f"layout {gradient.layout}. Build its embedding with sparse=False, or leave "
                    "the parameter out of the sharded ones, or use replicate"
                ) from error

    def reduce(
        self, label: str, settings: UnitSettings, started: list[Pending], *, is_late: bool = False
    ) -> Moves | None:
        """Prepare the sum over the ranks of the buffered gradients (zeros when there are none).

        The caller launches the returned collectives; a custom one is added to ``started``. Memory
        that users receive is allocated here, on their stream, if `finish_reduce` is late.
        """
        buffer, axes, lines = self.buffer, self.axes, self.lines
        is_absent = not lines[0].has_gradient
        if is_absent:
            for line in lines:
                line.take([None] * len(line.indices))
        if self.partial_sums and not buffer.layout.cuts_dims:
            sum_parts(summands_of(self.partial_sums, lines[0]))
        if settings.is_watched:
            self._look_at_gradients()
        self._factor = 1.0 / (settings.divide_factor or axes.size)
        if is_late and self.types.reduce != self.types.master:
            self._result = torch.empty_like(buffer.shard, device=buffer.device)
        # A sum of float16 overflows easily: it is divided before.
        if self.types.reduce == torch.float16 and settings.reduce_hook is None:
            for line in lines:
                line.tensor.mul_(self._factor)
            self._factor = 1.0
        if self.marks_use:
            (line,) = lines
            for index in [n for n, used in enumerate(self.used) if not used and not is_absent]:
                for part in line.parts()[index]:
                    part.fill_(-0.0)
            starts = line.tensor.view(axes.parts, -1)[:, :1]
            starts.fill_(-0.0) if is_absent else starts.add_(0.0)  # which makes 0.0 of -0.0
        if settings.reduce_hook is not None:
            self._reduce_by(settings.reduce_hook)
            return None
        if axes.shard is None:
            line = lines[0].tensor
            self._reduced = self._line_for_sums().copy_(line) if is_late else line
            return None
        if settings.reduce_scatter is not None and axes.is_cut:
            custom = settings.reduce_scatter
            started.append(self._reduce_scatter_by(custom, axes.shard, f"reduce {label}"))
            return None
        reduced = self._reduced = self._line_for_sums()
        outputs = [reduced]
        if len(lines) > 1:
            outputs = [reduced[line.start : line.stop] for line in lines]
            self._zero_between(reduced.view(1, -1))
        if not axes.is_cut:  # as torch, which issues nothing over one rank
            reduced.copy_(lines[0].tensor)
            return None
        return Moves(axes.shard, outputs, [*map(_TENSOR, lines)])

    def _line_for_sums(self) -> torch.Tensor:
        buffer, dtype = self.buffer, self.types.reduce
        if dtype == self.types.master and buffer.is_on_host:
            # It pays where memory that was given back comes back in pages that have to be zeroed.
            return self.kept.take(buffer.layout.shard_size, dtype, buffer.device)
        return torch.empty(buffer.layout.shard_size, dtype=dtype, device=buffer.device)

    def _reduce_by(self, hook: ReduceHook) -> None:
        """Sum the gradients by ``hook``, whose result is not scaled."""
        whole, self._factor = self._whole_line(), 1.0
        self.in_hook = whole
        if self.axes.shard is None:
            hook(whole, whole)
            self._reduced = whole.clone()
        else:
            self._reduced = self._line_for_sums()
            hook(whole, self._reduced)
        self.in_hook = None

    def _reduce_scatter_by(
        self, custom: CustomCollective, shard: Communicator, label: str
    ) -> Pending:
        """Start a sum over ``shard`` by the user's ``custom``, in memory that it allocates."""
        layout, types = self.buffer.layout, (self.types.reduce, self.buffer.device)
        sent = custom.allocate((layout.padded_size,), dtype=types[0], device=types[1])
        self._write_whole(sent)
        out = custom.allocate((layout.shard_size,), dtype=types[0], device=types[1])
        self._reduced = out
        return shard.custom("reduce_scatter", custom, out, sent, label=label)

    def _whole_line(self) -> torch.Tensor:
        """Return all gradients in one buffer, shard by shard, as a hook expects."""
        lines = self.lines
        if len(lines) == 1:
            return lines[0].tensor
        return self._write_whole(lines[0].tensor.new_empty(self.buffer.layout.padded_size))

    def _write_whole(self, whole: torch.Tensor) -> torch.Tensor:
        rows = whole.view(self.axes.parts, -1)
        for line in self.lines:
            rows[:, line.start : line.stop] = line.tensor.view(self.axes.parts, -1)
        self._zero_between(rows)
        return whole

    def _zero_between(self, rows: torch.Tensor) -> None:
        """Zero the gaps between the gradients in each of ``rows``, which are shards."""
        for line, following in pairwise(self.lines):
            if line.stop < following.start:
                rows[:, line.stop : following.start] = 0

    def _look_at_gradients(self) -> None:
        if self.mean is None and self.partial is None:  # those before have been delivered
            self.non_finite.clear()
        for line in reversed(self.lines):
            self.non_finite.look(line.tensor, partial(self._parts_of, line))

    def _parts_of(self, line: GradientLine) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the gradients of ``line`` by name, in backward order."""
        for index, parts in reversed(list(zip(line.indices, line.parts(), strict=True))):
            for part in parts:
                yield self.slots[index].name, part

    def reduce_further(self, label: str, settings: UnitSettings, started: list[Pending]) -> None:
        """Start the second sum, over ``replicate``, after the first; it is added to ``started``."""
        replicate, reduced = self.axes.replicate, self._reduced
        if reduced is None or replicate is None or settings.reduce_hook is not None:
            return
        if self.partial is not None:
            reduced += self.partial
            self._added, self.partial = self.partial, None
        if settings.all_reduce:
            kind = "replicate" if self.axes.shard is not None else "reduce"
            started.append(replicate.all_reduce(reduced, label=f"{kind} {label}"))
        else:
            self.partial = reduced

    def finish_reduce(
        self, settings: UnitSettings, *, is_late: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        """Add this rank's part of the mean to ``mean``, unless it is still partial.

        If ``is_late``, on another stream than the gradients', the gradients are not freed, and the
        caller holds what is returned until their stream waits for this one.
        """
        reduced, added, result = self._reduced, self._added, self._result
        self._reduced = self._added = self._result = None
        if not is_late:
            if reduced is not None and self.axes.shard is None and settings.reduce_hook is None:
                # It was summed in place, in the gradients' own line, which is freed below.
                own = self._line_for_sums().copy_(reduced)
                if self.partial is reduced:
                    self.partial = own
                reduced = own
            self.release_gradients()
        if reduced is None or reduced is self.partial:
            return (added,)
        if settings.scale is not None:
            whole = settings.divide_factor or self.axes.size
            self._factor = settings.scale() * (self._factor * whole)
        if settings.shard_hook is not None:
            settings.shard_hook(reduced)
        mean = reduced.to(self.types.master) if result is None else result.copy_(reduced)
        if isinstance(self._factor, torch.Tensor):
            multiply_([mean], self._factor.to(mean.device))
        elif self._factor != 1.0:
            mean.mul_(self._factor)
        if self.mean is not None:
            # A reduction before this one, of a backward that was not the last, say, waits still.
            self.mean.add_(mean.to(self.mean.device))
        else:
            self.mean = mean if self.home is None else self._at_home(mean)
        return added, reduced, mean

    def _at_home(self, mean: torch.Tensor) -> torch.Tensor:
        """Start to copy ``mean`` to the device of the shards."""
        shard = self.buffer.shard
        if mean.device == shard.device:
            return mean
        return torch.empty_like(shard, pin_memory=shard.is_pinned()).copy_(mean, non_blocking=True)

    def is_unused(self, mean: torch.Tensor) -> bool:
        """Whether no rank had a gradient for ``mean``; called where this rank had none.

        A sum is -0.0 only if all summands are, and only ranks without a gradient send -0.0 as the
        first element of each part. So this needs no collective of its own.
        """
        first = mean[:1].real if mean.is_complex() else mean[:1]
        return bool(((first == 0) & first.signbit()).all())

    def waiting(self) -> list[torch.Tensor | None]:
        """List whole gradients of this rank that wait for a reduction, not copied."""
        if not self.lines[0].has_gradient:
            gradients = [*map(self._gradient_of, self.slots)]
            self._refuse_sparse(gradients)
            return gradients
        self.accumulate()
        parts = (part for line in self.lines for (part,) in line.parts())
        return [part if used else None for part, used in zip(parts, self.used, strict=True)]

    def forget_waiting(self, indices: Iterable[int]) -> None:
        """Drop the gradients of these parameters that wait for a reduction."""
        for index in indices:
            slot, self.used[index] = self.slots[index], False
            slot.full.grad = slot.leaf.grad = None
            for line in self.lines if self.lines[0].has_gradient else ():
                for part in line.parts()[index]:
                    part.zero_()
        if not any(self.used):
            self.release_gradients()

    def partial_means(self) -> list[Summand]:
        """List the parts of ``mean`` that other axes have to sum."""
        if self.mean is None or not self.buffer.layout.cuts_dims:
            return []
        return [(add, self.buffer.own(index, self.mean)) for index, add in self.partial_sums]

    def drop(self) -> None:
        """Drop gradients and sums of an iteration that will not be finished."""
        self._reduced = self.partial = self.mean = None
        self.kept.forget()
        self.release_gradients()
        self.used = [False] * len(self.slots)
        for slot in self.slots:
            slot.full.grad = slot.leaf.grad = None


def have_gradients(slots: Collection[Slot]) -> bool:
    """Whether autograd has left a gradient on a full parameter of ``slots``."""
    found = {*map(type, map(_OF_LEAF, slots)), *map(type, map(_OF_WHOLE, slots))}
    return not found <= {type(None)}


@torch.no_grad()
def _gathered(slot: Slot) -> torch.Tensor | None:
    """This rank's gradient of a parameter, including what has reached its DTensor ``full``."""
    given, leaf, add = slot.full.grad, slot.leaf, slot.computes.partial
    if given is None or slot.outer is None:
        return leaf.grad
    mine = local_gradient(given, slot.outer, () if slot.place is None else slot.place.kept)
    if leaf is slot.full:
        return mine
    slot.full.grad = None
    if mine is not None and add is not None and add.communicator.rank:
        mine = torch.zeros_like(mine)  # it is whole, and counts once in the sum
    leaf.grad = mine if leaf.grad is None or mine is None else leaf.grad.add_(mine)
    return leaf.grad
