"""The view of a unit's parameters outside of its computation: one flat shard, or the originals.

While a unit computes, its modules have the whole parameters registered, as in one process. The
parameters at rest are registered again when the unit is freed, at the latest when the backward has
ended. A unit's parameters share one buffer that is split at any element: a rank has pieces of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.after_hooks import run_after_hooks
from meshwright.comm.dtensors.gradient_part import gradient_part, plain, waiting_gradient
from meshwright.comm.dtensors.sharded_axes import is_marked_spread
from meshwright.data_parallel.distributed_parameters import cut_axes, mark_spread
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.replaced_parameters import rank_in, replaced
from meshwright.data_parallel.shards.slot import Slot, accumulator_of, change_by_hooks
from meshwright.data_parallel.shards.unit import Exposure, Unit
from meshwright.errors import InternalError
from meshwright.gradients import mark_mean, warn_of_zeros
from meshwright.layout import FlatLayout, FlatPiece
from meshwright.torch_internals.autograd import backward_hooks_of
from meshwright.torch_internals.modules import FLAT
from meshwright.torch_internals.tensors import foreach_copy_, version_of

# Whole gradients of this rank that wait for a reduction are ``.grad`` of what optimizers hold.
# After a backward in ``no_sync`` programs find there what has been added up so far: they look at
# it, scale it, and drop it with ``zero_grad``. Before the next backward it is taken back.
#
# A gradient that autograd gives to what a unit shows, past the full parameters, is rejected: only a
# loss that has read a parameter beside its module makes one, computed with this rank's piece.


@dataclass(slots=True, kw_only=True)
class _Shown:
    holder: nn.Parameter
    shell: torch.Tensor
    """The ``.grad``: torch only takes one of the holder's shape, but its data may be any."""
    gradient: torch.Tensor
    """The sum that waits: the shell's data, or in another dtype, of which the shell has a copy."""
    before: torch.Tensor | None
    """Gradients that had been reduced, and wait for more."""
    version: int


class WaitingGradients:
    """The unreduced gradients that one unit shows as ``.grad``."""

    def __init__(self) -> None:
        self._shown: list[_Shown | None] = []

    def show(
        self,
        name: str,
        holders: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        dtypes: Iterable[torch.dtype],
    ) -> bool:
        """Set ``.grad`` of each holder in unit ``name``; True if any has a gradient.

        ``dtypes`` are the parameters' dtypes in the computation, which autograd's gradients have.
        Taking the norm of these gradients is refused, because it would be that of this rank.
        """
        self._shown = [
            None if gradient is None else _show(name, holder, gradient, dtype)
            for holder, gradient, dtype in zip(holders, gradients, dtypes, strict=True)
        ]
        return any(self._shown)

    def take(self) -> list[bool]:
        """Restore the former ``.grad``; returns which ones the user has dropped."""
        taken = [each is not None and _take(each) for each in self._shown]
        self._shown.clear()
        return taken


def _show(name: str, holder: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype) -> _Shown:
    before = holder.grad
    holder.grad = shell = waiting_gradient(holder, name)
    shell.data = gradient.to(dtype)
    return _Shown(
        holder=holder, shell=shell, gradient=gradient, before=before, version=version_of(shell)
    )


@torch.no_grad()
def _take(shown: _Shown) -> bool:
    holder, shell, before = shown.holder, shown.shell, shown.before
    found = holder.grad
    is_dropped = found is None
    if found is not None and found is not shell:
        shell.copy_(found)
    if shell.dtype != shown.gradient.dtype and version_of(shell) != shown.version:
        shown.gradient.copy_(plain(shell))
    if before is not None and version_of(shell) != shown.version and not shell.any():
        before.zero_()  # so was all that this stands for
    # Its memory may be freed: callers that still hold the tensor must not read that.
    shell.data = shell.data.new_empty(0)
    holder.grad = None if is_dropped else before
    return is_dropped


class Refusals:
    """The tensors of a unit that must not get a gradient from autograd; steps cost nothing."""

    def __init__(self) -> None:
        self._nodes: dict[str, object] = {}
        """Nodes that autograd would accumulate with: their hooks last while somebody holds them."""

    def add(self, unit: Unit, tensor: torch.Tensor, slots: Sequence[Slot], what: str) -> None:
        """Make a backward raise RuntimeError before it gives the leaf ``tensor`` a gradient.

        ``tensor`` holds this rank's part of ``slots``, and messages call it ``what``.
        """
        communicators = unit.communicators
        if all(axis.size == 1 for axis in communicators):
            return
        trains = tensor.requires_grad
        node = accumulator_of(tensor.requires_grad_())
        tensor.requires_grad_(trains)
        if node is self._nodes.get(what):
            return

        def refuse(gradients: object) -> None:
            names = [slot.name for slot in slots]
            rest = f" or {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(
                f"rank {rank_in(communicators)}: the loss has read a parameter beside its module, "
                f"{' or '.join(names[:3])}{rest}, of which this rank shows its part: "
                "neither loss nor gradient are those of one process. Compute that term inside of "
                "the forward of the module that uses the parameter, or use fully_shard, whose "
                "parameters are DTensors and may be read; to look at it without a gradient, use "
                "summon_full_params"
            )

        node.register_prehook(refuse)
        self._nodes[what] = node


class FlatParameter(nn.Parameter):
    """All parameters of one unit in one flat tensor, of which this rank holds its shard."""

    _meshwright_unit_name = FLAT
    """It belongs to a unit, so no other unit takes it over."""


class Exposed(Exposure):
    """A view whose tensors an optimizer may hold."""

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        self._gradient_dtype = gradient_dtype
        self._seen = -1
        """The version when whole parameters were shown last."""
        self._lists_full = False
        """True while modules register whole parameters."""
        self._refusals = Refusals()
        self._waiting = WaitingGradients()

    @abstractmethod
    def registered(self, unit: Unit) -> list[torch.Tensor]:
        """List what modules now hold in place of these tensors."""

    def is_stale(self, unit: Unit) -> bool:
        """Whether a parameter was written in place after it was gathered."""
        return self._seen != self.version(unit)

    @abstractmethod
    def is_replaced(self, unit: Unit) -> bool:
        """Whether a parameter is another object, or is not in its place in the shard."""

    @abstractmethod
    def convert(self, unit: Unit) -> None:
        """Rebuild buffers from tensors that ``.to`` or ``.half`` has replaced."""

    def show_nothing(self, unit: Unit) -> None:
        """Put empty tensors into modules whose parameters are in one flat parameter."""
        return

    @abstractmethod
    def list_full(self, unit: Unit) -> None:
        """Register gathered full parameters again after they were hidden."""

    @abstractmethod
    def list_at_rest(self, unit: Unit) -> None:
        """Register the optimizer's parameters while whole ones are kept.

        Not before the root's backward has ended, because a loss may read the whole ones.
        """


class FlatExposure(Exposed):
    """One flat parameter on the wrapped module; while sharded the modules hold empty tensors."""

    def __init__(self, owner: nn.Module, gradient_dtype: torch.dtype | None = None) -> None:
        super().__init__(gradient_dtype)
        self._owner = owner
        self._flat: FlatParameter | None = None
        self._nothing = torch.empty(0, device="cpu")
        """The tensor that modules hold while the unit is sharded. Nobody else should change it."""
        self._nothing_trains = False
        self._orders: dict[nn.Module, list[str]] = {}
        """The names of parameters in modules that hold others, too."""
        self._line = torch.empty(0, device="cpu")
        """Gradients of passes in ``no_sync``."""
        self._joined: list[torch.Tensor] = []
        """Those of each parameter, in that line."""

    def _only_group(self, unit: Unit) -> ParameterGroup:
        (group,) = unit.groups
        return group

    def _take_over(self, unit: Unit) -> FlatParameter:
        group = self._only_group(unit)
        trains = group.slots[0].original.requires_grad
        flat = FlatParameter(group.buffer.shard, requires_grad=trains)
        mark_pieces(flat, group, group.slots, is_line=True)
        for slot in group.slots:
            for module, name in slot.places:
                self._orders.setdefault(module, list(module._parameters))
                module._parameters.pop(name, None)
        # Where other parameters stay, the order of all has to be restored.
        self._orders = {
            module: order for module, order in self._orders.items() if module._parameters
        }
        self.owner.register_parameter(FLAT, flat)
        return flat

    @property
    def owner(self) -> nn.Module:
        return self._owner

    @property
    def one_flat(self) -> nn.Parameter | None:
        return self._flat

    @property
    def flat(self) -> FlatParameter:
        if self._flat is None:
            raise InternalError("a flat parameter was requested before its unit was built")
        return self._flat

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        return [self.flat]

    def registered(self, unit: Unit) -> list[torch.Tensor]:
        held = self.owner._parameters.get(FLAT)
        return [self.flat if held is None else held]

    def show_sharded(self, unit: Unit) -> None:
        if self._flat is None:
            self._flat = self._take_over(unit)
            self._refusals.add(unit, self._flat, unit.slots, FLAT)
        else:
            self._find(unit)
        self.show_nothing(unit)

    def show_nothing(self, unit: Unit) -> None:
        before, flat = self._nothing, self.flat
        kind = flat.dtype, flat.device, flat.requires_grad
        if (before.dtype, before.device, self._nothing_trains) != kind:
            self._nothing = flat.data[:0].requires_grad_(flat.requires_grad)
            self._nothing_trains = flat.requires_grad
            self._refusals.add(unit, self._nothing, unit.slots, "")
        self._hide(unit, before)

    def show_full(self, unit: Unit) -> None:
        self._seen = self.version(unit)
        self._find(unit)
        trains = self.flat.requires_grad
        for slot in unit.slots:
            if slot.full.requires_grad is not trains:
                slot.full.requires_grad_(trains)
        self._list(unit)

    def list_full(self, unit: Unit) -> None:
        if not self._lists_full:
            self._list(unit)

    def list_at_rest(self, unit: Unit) -> None:
        if self._lists_full:
            self._find(unit)
            self._hide(unit)

    def _list(self, unit: Unit) -> None:
        """Register full parameters in modules."""
        for slot in unit.slots:
            for module, name in slot.places:
                found = module.__dict__.get(name)
                if found is self._nothing or found is slot.full:
                    del module.__dict__[name]
                    module._parameters[name] = slot.full
        self._lists_full = True
        self.owner._parameters.pop(FLAT, None)
        for module, order in self._orders.items():
            held = module._parameters
            held.update([(name, held.pop(name)) for name in order if name in held])

    def _hide(self, unit: Unit, before: torch.Tensor | None = None) -> None:
        """Set full parameters as attributes of modules, or with ``before`` the empty tensor."""
        nothing = self._nothing
        for slot in unit.slots:
            whole = slot.full
            for module, name in slot.places:
                listed, attributes = module._parameters, module.__dict__
                if listed.get(name) is whole:
                    del listed[name]
                found = attributes.get(name)
                is_free = found is None and name not in listed
                if is_free or found is before or found is nothing or found is whole:
                    # Modules look at them also where they do not compute, to be printed.
                    attributes[name] = whole if before is None else nothing
        self._lists_full = False
        self.owner._parameters[FLAT] = self._flat

    def _find(self, unit: Unit) -> None:
        """Raise RuntimeError if a module holds anything but its current tensor."""
        for slot in unit.slots:
            for module, name in slot.places:
                found = module.__dict__.get(name)
                if found is None:
                    found = module._parameters.get(name)
                    if found is self._nothing:  # what `functional_call` puts back after a parameter
                        module.__dict__[name] = module._parameters.pop(name)
                if found is not slot.full and found is not self._nothing:
                    raise replaced(slot.name, module, found, slot.leaf.shape, unit.communicators)

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        return [self.flat.requires_grad] * len(group.slots)

    def has_gradients(self, unit: Unit) -> bool:
        return self.flat.grad is not None and self.flat.numel() > 0

    def is_replaced(self, unit: Unit) -> bool:
        flat = self.flat
        is_held = self._lists_full or self.owner._parameters.get(FLAT) is flat
        return (
            not is_held
            or self._nothing.numel() > 0
            or flat.data_ptr() != self._only_group(unit).buffer.shard.data_ptr()
        )

    def version(self, unit: Unit) -> int:
        return version_of(self._only_group(unit).buffer.shard)

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """See `Exposure`. Missing gradients become zeros if any exists: ``.grad`` is one tensor.

        ``used`` is of this rank alone.
        """
        flat, self._line = self.flat, self._nothing
        self._joined.clear()
        if not any(used) and group.is_unused(reduced):
            return
        if not all(used):
            warn_of_zeros(flat, lambda: _unused_in(group, reduced, used))
        change_piece_by_hooks(group, flat, reduced, FLAT)
        if flat.grad is None:
            give_gradient(flat, part_of(reduced, flat, FLAT), self._gradient_dtype)
        else:
            flat.grad.add_(reduced)
        run_after_hooks(flat)

    @torch.no_grad()
    def show_waiting(self, unit: Unit) -> bool:
        """See `Exposure`. They are joined in one tensor, to which autograd adds later."""
        group = self._only_group(unit)
        found = group.waiting()
        if all(gradient is None for gradient in found):
            return False
        size = flat_layout(group).numel
        if group.lines[0].has_gradient:
            (line,) = group.lines
            gradients, dtypes = [line.tensor[:size]], [group.types.compute]
            return self._waiting.show(unit.name, [self.flat], gradients, dtypes)
        if any(a is not b for a, b in zip(found, self._joined, strict=False)) or not self._joined:
            self._join(group, found)
        return self._waiting.show(unit.name, [self.flat], [self._line], [group.types.compute])

    def _join(self, group: ParameterGroup, gradients: Sequence[torch.Tensor | None]) -> None:
        layout = flat_layout(group)
        line = torch.zeros(layout.numel, dtype=group.types.compute, device=group.buffer.device)
        self._line = line
        ranges = map(layout.range, range(len(gradients)))
        parts = [line[slice(*r)].view(s) for r, s in zip(ranges, layout.shapes, strict=True)]
        targets = [p for p, g in zip(parts, gradients, strict=True) if g is not None]
        foreach_copy_(targets, [gradient for gradient in gradients if gradient is not None])
        for slot, part in zip(group.slots, parts, strict=True):
            slot.leaf.grad = part
        self._joined = parts

    def take_waiting(self, unit: Unit) -> bool:
        taken = self._waiting.take()
        if any(taken):
            group = self._only_group(unit)
            group.forget_waiting(range(len(group.slots)))
        return bool(taken)

    def refresh(self, unit: Unit) -> None:
        """Take over a flat tensor that the user has set with ``.data``."""
        flat, shard = self.flat, self._only_group(unit).buffer.shard
        self._find(unit)
        nothing = self._nothing
        if nothing.numel() or nothing.requires_grad is not self._nothing_trains:
            raise RuntimeError(
                f"rank {rank_in(unit.communicators)}: a parameter of unit {unit.name!r} was "
                "changed by itself (.data, requires_grad_, swap_tensors), and is a part of one "
                "flat parameter: set use_orig_params=True, or change it in summon_full_params"
            )
        held = self.owner._parameters.get(FLAT)
        if held is not flat and not self._lists_full:
            raise replaced(FLAT, self.owner, held, flat.shape, unit.communicators)
        if flat.data_ptr() != shard.data_ptr():
            write_back(flat, shard, FLAT)

    def convert(self, unit: Unit) -> None:
        flat, group = self.flat, self._only_group(unit)
        shard = group.buffer.shard
        if flat.shape == shard.shape:
            group.carry_starts([group.buffer.own(n, flat.data) for n in range(len(group.slots))])
        if flat.dtype != shard.dtype or flat.device != shard.device:
            group.convert(flat.dtype, flat.device)
            shard = group.buffer.shard
        if flat.data_ptr() != shard.data_ptr():
            shard.copy_(flat.data)
            flat.data = shard
            self._refusals.add(unit, flat, unit.slots, FLAT)
            unit.has_changed()


def exposed_of(unit: Unit) -> Exposed:
    """Return the exposure of ``unit``, which belongs to a wrapper."""
    return cast("Exposed", unit.exposure)


def flat_layout(group: ParameterGroup) -> FlatLayout:
    """The layout of a unit of the FSDP class: always packed."""
    return group.buffer.layout.packed_layout()


def _unused_in(group: ParameterGroup, mean: torch.Tensor, used: Sequence[bool]) -> list[str]:
    """Name parameters without a gradient on any rank, as far as this rank's part shows.

    A sum is -0.0 only where all its summands are. The first element of a part stands for all its
    parameters and is skipped. ``used`` are the parameters with a gradient on this rank.
    """
    found: list[str] = []
    for index, piece in own_pieces(group).items():
        own = mean[max(piece.offset, 1) : piece.offset + piece.numel]
        own = own.real if own.is_complex() else own
        if not used[index] and own.numel() and bool(((own == 0) & own.signbit()).all()):
            found.append(group.slots[index].name)
    return found


def own_pieces(group: ParameterGroup) -> dict[int, FlatPiece]:
    """List this rank's pieces of parameters, if it has any, by the parameter's index.

    A parameter without any elements counts as whole on every rank.
    """
    layout = flat_layout(group)
    pieces = {piece.index: piece for piece in layout.owned(group.axes.part)}
    for index, shape in enumerate(layout.shapes):
        if 0 in shape:
            pieces[index] = FlatPiece(index, 0, 0, 0)
    return pieces


def cuts_of(group: ParameterGroup, slots: Iterable[Slot]) -> set[tuple[Communicator, ...]]:
    """The sets of axes over which elements of ``slots`` are sharded."""
    return {cut_axes(slot.outer, group.axes.shard) for slot in slots}


def mark_pieces(
    parameter: nn.Parameter, group: ParameterGroup, slots: Sequence[Slot], *, is_line: bool
) -> None:
    """Mark ``parameter`` with the ranks that hold the rest of it, for sums over all parameters.

    Also with the ranks that its gradient is averaged over, for optimizers.
    """
    mark_mean([parameter], group.axes.communicators)
    outers, name = [slot.outer for slot in slots], slots[0].name
    mark_spread(parameter, outers, group.axes.shard, name, is_line=is_line)


def change_piece_by_hooks(
    group: ParameterGroup, parameter: nn.Parameter, gradient: torch.Tensor, name: str
) -> None:
    """Run hooks of ``parameter`` on its gradient, unless this rank has only a piece of it.

    Raises RuntimeError in that case: a hook that takes a norm, say, would silently go wrong.
    """
    if not backward_hooks_of(parameter):
        return
    if group.axes.shard is not None:
        raise RuntimeError(
            f"{name!r} has a hook on its gradient, of which each rank holds one piece in a line "
            "without shape, so that the hook cannot do what it does in one process. Use "
            "fully_shard, whose hooks get DTensors, or register_post_accumulate_grad_hook, or "
            "change .grad between backward and step"
        )
    change_by_hooks(parameter, gradient, name)


def give_gradient(
    parameter: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Set ``.grad`` of a floating-point parameter, possibly in another dtype than its own."""
    parameter.grad = gradient
    if dtype is not None and gradient.is_floating_point() and parameter.grad is not None:
        # Assigned as data: torch refuses gradients of another dtype, custom optimizers take them.
        parameter.grad.data = gradient.to(dtype)


def part_of(gradient: torch.Tensor, parameter: nn.Parameter, name: str) -> torch.Tensor:
    """Make ``gradient`` a `GradientPart` if ``parameter`` is only a part."""
    return gradient_part(gradient, name) if is_marked_spread(parameter) else gradient


def places_in_shards(
    groups: Sequence[ParameterGroup],
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """List each parameter with its piece as a view of this rank's shard."""
    for group in groups:
        pieces, shard = own_pieces(group), group.buffer.shard
        for index, slot in enumerate(group.slots):
            piece = pieces.get(index)
            if piece is None:
                yield slot, shard[:0]
                continue
            line = shard[piece.offset : piece.offset + piece.numel]
            shape = flat_layout(group).shapes[index]
            yield slot, line if group.axes.shard is not None else line.view(shape)


@torch.no_grad()
def write_back(parameter: nn.Parameter, target: torch.Tensor, name: str) -> None:
    """Copy what the user has put into an exposed parameter to the shard, and point it there."""
    if parameter.device.type != target.device.type:
        raise RuntimeError(
            "Expected `FlatParameter` to be on the compute device or where it is offloaded to, "
            f"{target.device}, but got {parameter.device} for {name}. Move the whole module"
        )
    if parameter.shape != target.shape:
        raise RuntimeError(
            "Cannot writeback when the parameter shape changes: this rank's part has shape "
            f"{tuple(target.shape)}, found {tuple(parameter.shape)} for {name}. "
            "Change parameters inside summon_full_params"
        )
    gradient = parameter.grad
    if gradient is not None and gradient.shape != target.shape:
        raise RuntimeError(
            f"Cannot writeback when the gradient shape changes: expected {tuple(target.shape)}, "
            f"found {tuple(gradient.shape)} for {name}"
        )
    target.copy_(parameter.data)
    parameter.data = target
