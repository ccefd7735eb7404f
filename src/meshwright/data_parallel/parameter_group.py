"""The parameters of a unit that lie in one buffer: their slots, their gradients, the sums.

A `Slot` is one parameter with all its uses. A `ParameterGroup` is the slots of one dtype with their
buffer, and takes gradients through accumulation, reduction and scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.comm import Communicator, Pending
from meshwright.comm.dtensor import dtensor_at_rest, local_gradient, local_of
from meshwright.data_parallel.buffer import (
    BufferTypes,
    CustomCollective,
    DataAxes,
    FlatBuffer,
    free,
)
from meshwright.data_parallel.placement import Place
from meshwright.layout import ChunkedLayout, FlatLayout

__all__ = [
    "ParameterGroup",
    "ReduceHook",
    "Slot",
    "UnitSettings",
    "collect_slots",
    "group_slots",
]

ReduceHook = Callable[[torch.Tensor, torch.Tensor], None]
"""``hook(whole, out)``: reduces the whole line of gradients and writes this rank's part to ``out``
(both the same tensor where every rank holds the whole). It divides; nothing is scaled beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """What a unit does, replaced as a whole when something changes."""

    keep_full_after_forward: bool = False
    keep_full_after_backward: bool = False
    block: Communicator | None = None
    """Among whose ranks whole parameters are spread between forward and backward, if any."""
    unshard_in_backward: bool = True
    synchronise: bool = True
    """Whether a backward pass ends in a reduction; without one gradients stay whole, here."""
    all_reduce: bool = True
    """Whether a reduction also runs over ``replicate``. Without one, sums wait in the shard."""
    divide_factor: float | None = None
    """What summed gradients are divided by; the number of ranks when None."""
    scale: Callable[[], float] | None = None
    """What summed gradients are multiplied by instead; asked when a reduction ends."""
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
    """Whether the unit that came next in the last iteration is gathered ahead in the forward."""
    backward_prefetch: bool = True
    """Whether the unit that ran before is gathered ahead in the backward."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """One parameter of a unit and everywhere it is used."""

    names: list[str]
    """Full names, one for each place."""
    places: list[tuple[nn.Module, str]]
    """The modules and attributes that hold it."""
    original: nn.Parameter
    """What the module held when it was taken over; its storage is given up then."""
    full: nn.Parameter = field(init=False)
    """What computes: the same object for good, with memory while the unit is gathered."""
    local: torch.Tensor | None = None
    """This rank's chunk where it is not cut from ``original``; taken by the next group."""
    place: Place | None = None
    """Where it goes, where that is more than a part of a line."""
    is_spread: bool = False
    """Whether modules of other units use it too."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def show(self, parameter: nn.Parameter | torch.Tensor) -> None:
        """Put ``parameter`` into every module that holds this one."""
        for module, name in self.places:
            # Not setattr: the order of the names has to stay, and this is on the hot path.
            module._parameters[name] = parameter  # pyrefly: ignore[unsupported-operation]


class ParameterGroup:
    """The parameters of a unit that lie in one buffer."""

    def __init__(
        self,
        slots: Sequence[Slot],
        layout: FlatLayout | ChunkedLayout,
        axes: DataAxes,
        types: BufferTypes,
        device: torch.device,
    ) -> None:
        self.slots = tuple(slots)
        self.axes = axes
        self.types = types
        self.buffer = FlatBuffer(layout, axes, types, device)
        self.buffer.fill(
            [None if slot.local is not None else local_of(slot.original) for slot in slots]
        )
        self._has_outer = any(slot.place is not None and slot.place.outer for slot in slots)
        for index, slot in enumerate(slots):
            if slot.local is not None:
                self.buffer.local(index).copy_(slot.local)
                slot.local = None
        self._show_views()
        self.used = [False] * len(slots)
        """Which parameters have had a gradient on this rank since the last reduction."""
        self.non_finite: list[str] = []
        """Parameters whose own gradient was not finite in the last reduction that was watched."""
        self.partial: torch.Tensor | None = None
        """Sums over ``shard`` that have not been over ``replicate`` yet."""
        self._reduced: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._factor = 1.0
        self.mean: torch.Tensor | None = None
        """This rank's part of the mean gradient, finished and not delivered yet."""

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Start over with an empty shard of another dtype or on another device."""
        before = self.types
        self.types = replace(
            before,
            master=dtype,
            compute=dtype if before.compute == before.master else before.compute,
            reduce=dtype if before.reduce == before.master else before.reduce,
            home=None if before.home is None else device,
        )
        computes = device if before.home is None else self.buffer.device
        self.buffer = FlatBuffer(self.buffer.layout, self.axes, self.types, computes)
        self._show_views()

    def _show_views(self) -> None:
        for slot, view in zip(self.slots, self.buffer.views, strict=True):
            outer = None if slot.place is None else slot.place.outer
            if outer is not None:
                view = dtensor_at_rest(
                    view, outer.mesh, outer.placements, outer.shape, outer.stride
                )
            slot.full = nn.Parameter(view, requires_grad=slot.original.requires_grad)

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters requires grad now."""
        return any(slot.full.requires_grad for slot in self.slots)

    @property
    def has_new_gradient(self) -> bool:
        """Whether autograd has left gradients on the whole parameters."""
        return any(slot.full.grad is not None for slot in self.slots)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move the gradients that autograd has left on the parameters to the buffer."""
        gradients = [slot.full.grad for slot in self.slots]
        if not any(gradient is not None for gradient in gradients):
            return
        if self._has_outer:
            gradients = [_local(s, g) for s, g in zip(self.slots, gradients, strict=True)]
        self.buffer.take(gradients)
        for index, slot in enumerate(self.slots):
            if gradients[index] is not None:
                self.used[index] = True
                slot.full.grad = None

    @torch.no_grad()
    def reduce(self, label: str, settings: UnitSettings) -> None:
        """Start the sum over the ranks of what the buffer holds (zeros when it holds nothing)."""
        buffer, axes = self.buffer, self.axes
        if not buffer.has_gradient:
            buffer.take([None] * len(self.slots))
        line = buffer.gradient
        if settings.is_watched:
            self.non_finite = self._find_non_finite()
        self._factor = 1.0 / (settings.divide_factor or axes.size)
        if settings.reduce_hook is not None:
            out = line if axes.shard is None else line.new_empty(buffer.layout.shard_size)
            settings.reduce_hook(line, out)
            self._reduced, self._factor = out.clone() if out is line else out, 1.0
            return
        if line.dtype == torch.float16:
            line.mul_(self._factor)
            self._factor = 1.0
        if axes.shard is None:
            self._reduced = line
            return
        if settings.reduce_scatter is not None and axes.parts > 1:
            self._reduce_by(settings.reduce_scatter, axes.shard, line, label)
            return
        self._reduced = line.new_empty(buffer.layout.shard_size)
        self._pending = axes.shard.reduce_scatter(self._reduced, line, label=f"reduce {label}")

    def _reduce_by(
        self, custom: CustomCollective, shard: Communicator, line: torch.Tensor, label: str
    ) -> None:
        """Sum over ``shard`` in memory and by a call of the user's."""
        sent = custom.allocate((line.numel(),), dtype=line.dtype, device=line.device)
        sent.copy_(line)
        size = self.buffer.layout.shard_size
        self._reduced = custom.allocate((size,), dtype=line.dtype, device=line.device)
        self._pending = shard.custom(
            "reduce_scatter", custom, self._reduced, sent, label=f"reduce {label}"
        )

    def _find_non_finite(self) -> list[str]:
        # One pass over the whole line; only a bad one is searched.
        if math.isfinite(self.buffer.gradient.sum().item()):
            return []
        slots = zip(self.slots, self.buffer.gradient_parts(), strict=True)
        return [
            slot.name
            for slot, parts in slots
            if not all(bool(torch.isfinite(part).all()) for part in parts)
        ]

    @torch.no_grad()
    def reduce_further(self, label: str, settings: UnitSettings) -> None:
        """Start the second sum, over ``replicate``, when the first has ended."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        replicate, reduced = self.axes.replicate, self._reduced
        if reduced is None or replicate is None or settings.reduce_hook is not None:
            return
        if self.partial is not None:
            reduced += self.partial
            self.partial = None
        if settings.all_reduce:
            kind = "replicate" if self.axes.shard is not None else "reduce"
            self._pending = replicate.all_reduce(reduced, label=f"{kind} {label}")
        else:
            self.partial = reduced

    @torch.no_grad()
    def finish_reduce(self, settings: UnitSettings) -> None:
        """Wait, and add this rank's part of the mean to ``mean``, unless it is partial still."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        reduced, self._reduced = self._reduced, None
        if reduced is self.buffer.gradient:
            reduced = reduced.clone()
        free(self.buffer.gradient)
        if reduced is None or reduced is self.partial:
            return
        if settings.scale is not None:
            self._factor *= settings.scale() * (settings.divide_factor or self.axes.size)
        if settings.shard_hook is not None:
            settings.shard_hook(reduced)
        reduced = reduced.to(self.types.master)
        if self._factor != 1.0:
            reduced.mul_(self._factor)
        if self.types.home is not None:
            reduced = reduced.to(self.types.home)
        self.mean = reduced if self.mean is None else self.mean.add_(reduced)

    def drop(self) -> None:
        """Forget gradients and sums of an iteration that will not be finished."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._reduced = self.partial = self.mean = None
        free(self.buffer.gradient)
        self.used = [False] * len(self.slots)
        for slot in self.slots:
            slot.full.grad = None


def _local(slot: Slot, gradient: torch.Tensor | None) -> torch.Tensor | None:
    place = slot.place
    if place is None or place.outer is None:
        return gradient
    return local_gradient(gradient, place.outer, place.kept)


def collect_slots(
    modules: Iterable[tuple[str, nn.Module]], ignored: Iterable[torch.Tensor] = ()
) -> list[Slot]:
    """The parameters that ``modules`` (with their full names) hold themselves, each once."""
    skipped = {id(parameter) for parameter in ignored}
    slots: dict[int, Slot] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            slot = slots.get(id(parameter))
            if slot is None:
                slots[id(parameter)] = Slot(
                    names=[full_name], places=[(module, name)], original=parameter
                )
            else:
                slot.names.append(full_name)
                slot.places.append((module, name))
    return list(slots.values())


def group_slots(slots: Iterable[Slot], *, by_training: bool = True) -> list[list[Slot]]:
    """Slots that can share a buffer: one dtype, and all trainable or all frozen by default."""
    groups: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        is_trainable = slot.original.requires_grad or not by_training
        groups.setdefault((slot.original.dtype, is_trainable), []).append(slot)
    return list(groups.values())
