"""One communication group of modules: its parameters come and go together, so do its gradients.

The phase tells where the parameters are::

    phase        may become
    SHARDED      GATHERING   (`unshard`)
    GATHERING    FULL        (`wait_unshard`)
    FULL         SHARDED     (`reshard`), REDUCING (`reshard` while gradients travel)
    REDUCING     SHARDED     (`finish_reduce`), GATHERING (needed again before that)

A driver decides when. How parameters look to the modules and to the optimizer is an `Exposure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.buffer import BufferTypes, DataAxes, FlatBuffer, free
from meshwright.errors import InternalError
from meshwright.layout import ChunkedLayout, FlatLayout

__all__ = [
    "Exposure",
    "ParameterGroup",
    "Phase",
    "ReduceHook",
    "Slot",
    "Unit",
    "UnitSettings",
    "collect_slots",
    "group_slots",
]


class Phase(StrEnum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    REDUCING = "reducing"


LEGAL = MappingProxyType(
    {
        Phase.SHARDED: frozenset({Phase.GATHERING}),
        Phase.GATHERING: frozenset({Phase.FULL}),
        Phase.FULL: frozenset({Phase.SHARDED, Phase.REDUCING}),
        Phase.REDUCING: frozenset({Phase.SHARDED, Phase.GATHERING}),
    }
)
"""Which phase may follow which."""

ReduceHook = Callable[[torch.Tensor, torch.Tensor], None]
"""``hook(whole, out)``: reduces the whole line of gradients and writes this rank's part to ``out``
(both the same tensor where every rank holds the whole). It divides; nothing is scaled beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """What a unit does, replaced as a whole when something changes."""

    keep_full_after_forward: bool = False
    keep_full_after_backward: bool = False
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
    forward_prefetch: bool = False
    """Whether the unit that came next in the last iteration is gathered ahead in the forward."""
    backward_prefetch: bool = True
    """Whether the unit that ran before is gathered ahead in the backward."""


@dataclass(slots=True, kw_only=True)
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
        self.buffer.fill([slot.original for slot in slots])
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
        self.types = BufferTypes(
            master=dtype,
            compute=dtype if before.compute == before.master else before.compute,
            reduce=dtype if before.reduce == before.master else before.reduce,
        )
        self.buffer = FlatBuffer(self.buffer.layout, self.axes, self.types, device)
        self._show_views()

    def _show_views(self) -> None:
        for slot, view in zip(self.slots, self.buffer.views, strict=True):
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
        self._reduced = line.new_empty(buffer.layout.shard_size)
        self._pending = axes.shard.reduce_scatter(self._reduced, line, label=f"reduce {label}")

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


class Exposure(Protocol):
    """How the parameters of a unit look outside of the computation."""

    def show_sharded(self, unit: Unit) -> None:
        """Let modules hold what optimizers and state dicts see."""
        ...

    def show_full(self, unit: Unit) -> None:
        """Let modules hold ``slot.full`` of each slot, with the ``requires_grad`` of now."""
        ...

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """Set or add to ``.grad``; ``used`` says which parameters had a gradient on any rank."""
        ...


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
        self.exposure = exposure
        self.settings = settings
        self.is_reducing = False
        """Whether a reduction has been started and not finished."""
        self._phase = Phase.SHARDED
        self._has_second_sum = False
        self.exposure.show_sharded(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self._phase})"

    @property
    def phase(self) -> Phase:
        """Where the parameters are."""
        return self._phase

    def rename(self, name: str, modules: Mapping[nn.Module, str]) -> None:
        """Be called ``name``, and call parameters by the full names of their ``modules``."""
        self.name = name
        for slot in self.slots:
            slot.names = [
                f"{modules[module]}.{attribute}" if modules[module] else attribute
                for module, attribute in slot.places
                if module in modules
            ] or slot.names

    @property
    def slots(self) -> list[Slot]:
        """Its parameters, group by group."""
        return [slot for group in self.groups for slot in group.slots]

    # ------------------------------------------------------------------------ parameters

    def unshard(self) -> None:
        """Start to gather the parameters; nothing when they are there or on their way."""
        if self._phase in (Phase.FULL, Phase.GATHERING):
            if self._phase is Phase.GATHERING or not any(g.buffer.is_stale for g in self.groups):
                return
            self._become(Phase.SHARDED)
        self._become(Phase.GATHERING)
        for group in self.groups:
            group.buffer.gather(f"unshard {self.name}")

    def wait_unshard(self) -> None:
        """Wait for the parameters and let the modules hold them."""
        if self._phase is Phase.FULL:
            return
        if self._phase is not Phase.GATHERING:
            self.unshard()
        for group in self.groups:
            group.buffer.finish_gather()
        self._become(Phase.FULL)
        self.exposure.show_full(self)

    def reshard(self) -> None:
        """Let the modules hold the sharded parameters and give the memory of the rest back."""
        if self._phase in (Phase.SHARDED, Phase.REDUCING):
            return
        if self._phase is Phase.GATHERING:
            self.wait_unshard()
        self.exposure.show_sharded(self)
        for group in self.groups:
            group.buffer.release()
        self._become(Phase.REDUCING if self.is_reducing else Phase.SHARDED)

    # ------------------------------------------------------------------------- gradients

    @property
    def has_gradient(self) -> bool:
        """Whether whole gradients of this rank wait for a reduction."""
        return any(
            group.has_new_gradient or (group.buffer.has_gradient and not self.is_reducing)
            for group in self.groups
        )

    @property
    def found_non_finite(self) -> list[str]:
        """Parameters whose gradient on this rank was not finite, in the last reduction."""
        return [name for group in self.groups for name in group.non_finite]

    @property
    def has_mean(self) -> bool:
        """Whether there are means to `deliver`."""
        return any(group.mean is not None for group in self.groups)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The axes that its gradients are summed over."""
        return self.groups[0].axes.communicators

    def accumulate(self) -> None:
        """Take the gradients that autograd has left on the whole parameters."""
        for group in self.groups:
            group.accumulate()

    def keep_gradients(self) -> None:
        """Leave gradients whole on this rank; they are added up in the dtype of the reduction."""
        for group in self.groups:
            if group.types.compute != group.types.reduce:
                group.accumulate()

    def reduce(self) -> None:
        """Start to sum gradients over the ranks; what this rank did not use counts as zero."""
        if self.is_reducing:
            raise InternalError(f"unit {self.name!r} reduces twice at a time")
        self.is_reducing = True
        for group in self.trainable_groups:
            group.reduce(self.name, self.settings)
        self._has_second_sum = False

    def reduce_further(self) -> None:
        """Start the second of two sums, when there is one; it waits for the first."""
        if self.is_reducing and not self._has_second_sum:
            self._has_second_sum = True
            for group in self.trainable_groups:
                group.reduce_further(self.name, self.settings)

    def finish_reduce(self) -> None:
        """Wait for the sums; the means are kept until `deliver`."""
        if not self.is_reducing:
            return
        self.reduce_further()
        for group in self.trainable_groups:
            group.finish_reduce(self.settings)
        self.is_reducing = False
        if self._phase is Phase.REDUCING:
            self._become(Phase.SHARDED)

    def deliver(self, used: Sequence[Sequence[bool]]) -> None:
        """Set ``.grad``; ``used`` tells for each trainable group what any rank had gradients of."""
        for group, flags in zip(self.trainable_groups, used, strict=True):
            if group.mean is not None:
                self.exposure.set_gradients(self, group, group.mean, flags)
                group.mean = None
                group.used = [False] * len(group.slots)

    def drop(self) -> None:
        """Give up an iteration that ended in an exception: nothing travels, all is sharded."""
        if self._phase is Phase.GATHERING:
            for group in self.groups:
                group.buffer.finish_gather()
            self._become(Phase.FULL)
        for group in self.groups:
            group.drop()
        self.is_reducing = False
        if self._phase is Phase.REDUCING:
            self._become(Phase.SHARDED)
        self.reshard()

    # --------------------------------------------------------------------------- private

    @property
    def trainable_groups(self) -> list[ParameterGroup]:
        """The groups in which a parameter requires grad now."""
        return [group for group in self.groups if group.is_trainable]

    def _become(self, phase: Phase) -> None:
        if phase not in LEGAL[self._phase]:
            raise InternalError(
                f"unit {self.name!r} is {self._phase} and cannot become {phase} now; from there "
                f"it may become {', '.join(sorted(LEGAL[self._phase]))}"
            )
        self._phase = phase


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
