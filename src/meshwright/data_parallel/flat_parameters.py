"""The flat view of a model: one long tensor for each unit, or for all that no unit manages.

An element-wise optimizer (SGD, Adam, AdamW) treats all elements alike, so it can step this rank's
part of a whole unit at once: a few long tensors instead of hundreds of short ones. The parameters
are views of the flat tensors, so both change together.

Backward passes, reductions and hooks work on the parameters as usual. Reading ``.grad`` of a flat
parameter, as an optimizer does, joins the gradients::

    gradients of parameters                       reading ``.grad`` of the flat parameter
    none has one                                  None
    all are views of the flat gradient            the flat gradient
    some are not, as after the next backward      those are copied there, and are views from then on
    some have none                                those are zeros there, and views too

So the flat gradient is no extra state, and zeroing either zeroes both. A group of one parameter
needs no copy: its gradient is the flat one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import (
    dtensor_at_rest,
    is_dtensor,
    known_at_rest,
    local_gradient,
    local_of,
)
from meshwright.comm.dtensors.gradient_part import gradient_part
from meshwright.comm.dtensors.sharded_axes import (
    ManyInOne,
    is_marked_spread,
    spread_of,
    spread_over,
)
from meshwright.comm.streams import is_host
from meshwright.data_parallel.replicas.bucket_layout import is_dense
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.data_parallel.shards.unit import Unit
from meshwright.gradients import look_at_optimizers, warn_of_zeros
from meshwright.torch_internals.tensors import foreach_copy_, set_local_tensor

_PLACE = "_meshwright_flat"

PIECE_BYTES = 4 * 2**20
"""The most bytes of a flat parameter on a CPU, unless one parameter alone is longer.

An optimizer takes memory of that size again and again, and fresh pages of the system for each of
its steps from some 16 MiB on: AdamW takes 36 ms for 32 MiB in pieces of 4 MiB, and 65 ms in one.
"""


class _GroupMember:
    """One parameter and its place in the flat tensor."""

    __slots__ = ("address", "gradient", "local_gradient", "name", "parameter", "start")

    def __init__(self, name: str, parameter: nn.Parameter, line: torch.Tensor, start: int) -> None:
        self.name = name
        self.parameter = parameter
        self.start = start
        local = local_of(parameter.detach())
        mine = self.part_of(line)
        mine.copy_(local)
        if is_dtensor(parameter):
            set_local_tensor(cast("Any", parameter), mine)
        else:
            parameter.data = mine
        self.address = local_of(parameter).data_ptr()
        self.gradient: torch.Tensor | None = None
        """The ``.grad`` of the parameter when that lies in the flat gradient."""
        self.local_gradient: torch.Tensor | None = None

    def part_of(self, line: torch.Tensor) -> torch.Tensor:
        """Return its part of ``line``, with the parameter's strides if they leave no holes."""
        local = local_of(self.parameter.detach())
        if is_dense(local):
            return line.as_strided(local.shape, local.stride(), self.start).detach()
        return line[self.start : self.start + local.numel()].view(local.shape).detach()

    def wrapped(self, part: torch.Tensor) -> torch.Tensor:
        """Return ``part``, of any dtype, as a DTensor if the parameter is one."""
        like = known_at_rest(self.parameter)
        if like is None:
            return part
        return dtensor_at_rest(part, like.mesh, like.placements, like.shape, like.stride)

    @property
    def is_in_place(self) -> bool:
        """True when the parameter's memory is still the flat parameter's."""
        return local_of(self.parameter).data_ptr() == self.address

    def given(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a ``gradient`` that is outside of the flat gradient."""
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"parameter {self.name!r} has a sparse gradient, which a flat parameter cannot "
                "hold: build its embedding with sparse=False"
            )
        like = known_at_rest(self.parameter)
        local = None if like is None else local_gradient(gradient, like, ())
        return gradient if local is None else local


class _FlatPlace:
    """The flat parameter that holds a parameter; copies of the parameter have none."""

    __slots__ = ("flat",)

    def __init__(self, flat: FlatGroupParameter) -> None:
        self.flat = flat

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class FlatGroupParameter(ManyInOne):
    """A 1-D parameter over the memory of several parameters, or of this rank's parts of them."""

    members: tuple[_GroupMember, ...]
    _gradient: torch.Tensor | None

    def has_changed(self) -> None:
        """Tell autograd, and replicas, that the flat parameter was written."""
        # The parts of DTensors count changes together with the memory that they are views of.
        increment_version([m.parameter for m in self.members if not is_dtensor(m.parameter)])

    @property
    def grad(self) -> torch.Tensor | None:
        """The joined gradients, zeros where one is missing; None when all are."""
        found = [member.parameter.grad for member in self.members]
        self._check()
        if all(gradient is None for gradient in found):
            return None
        warn_of_zeros(self, lambda: [m.name for m in self.members if m.parameter.grad is None])
        alone = self._alone(found)
        whole = self._gathered(found) if alone is None else alone
        return gradient_part(whole, self.members[0].name) if is_marked_spread(self) else whole

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            for member in self.members:
                member.parameter.grad = None
        else:
            given = gradient.clone()  # it may be the line itself, which is zeroed next
            self._gathered([None] * len(self.members)).copy_(given)

    def __deepcopy__(self, memo: object) -> FlatGroupParameter:
        raise TypeError(
            "a flat parameter is the memory of a model, so it cannot be copied alone: copy the "
            "model, and call flat_groups on the copy"
        )

    def register_hook(self, hook: object) -> NoReturn:
        """Refuse: see `view_as`."""
        raise _not_computed_with()

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refuse: see `view_as`."""
        raise _not_computed_with()

    def view_as(self, other: torch.Tensor) -> NoReturn:
        """Refuse a graph: the model computes with the parameters, so none would reach this one."""
        raise _not_computed_with()

    def parts_of(self, line: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Pair each parameter with its part of ``line``, a DTensor where the parameter is one."""
        return [(m.parameter, m.wrapped(m.part_of(line))) for m in self.members]

    def _alone(self, found: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of the only member, if laid out like its parameter; otherwise None."""
        if len(found) > 1 or found[0] is None:
            return None
        parameter, gradient = self.members[0].parameter, found[0]
        lies, is_at = known_at_rest(gradient), known_at_rest(parameter)
        if lies is not None and (is_at is None or lies.placements != is_at.placements):
            return None
        local, mine = local_of(parameter), local_of(gradient)
        if mine.layout is not torch.strided or mine.dtype != local.dtype or not is_dense(local):
            return None
        if mine.stride() != local.stride():
            return None
        return mine.detach().as_strided((local.numel(),), (1,))

    @torch.no_grad()
    def _gathered(self, found: Sequence[torch.Tensor | None]) -> torch.Tensor:
        line = self._gradient
        if line is None:
            line = self._gradient = torch.zeros_like(self.data)
            for member in self.members:
                member.local_gradient = member.part_of(line)
                member.gradient = member.wrapped(member.local_gradient)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for member, gradient in zip(self.members, found, strict=True):
            part = member.local_gradient
            if gradient is member.gradient or part is None:
                continue
            if gradient is None:
                part.zero_()
            else:
                targets.append(part)
                sources.append(member.given(gradient))
            member.parameter.grad = member.gradient
        if targets:
            foreach_copy_(targets, sources)
        return line

    def _check(self) -> None:
        for member in self.members:
            if not member.is_in_place:
                raise RuntimeError(
                    f"parameter {member.name!r} of shape {tuple(member.parameter.shape)} lies in "
                    "other memory than its flat parameter: it was converted or assigned after "
                    "flat_groups. Call flat_groups again, and build the optimizer with its result"
                )


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _not_computed_with() -> TypeError:
    return TypeError(
        "a flat parameter is the memory of others, with which the model computes: hooks, and "
        "optimizers in the backward, belong to the parameters of the model"
    )


def _stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, FlatGroupParameter):
                parameter.has_changed()


def flat_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> list[FlatGroupParameter]:
    """Make flat parameters, one for each dtype, device and set of sharding axes.

    On a CPU each is split into pieces, see `PIECE_BYTES`. Members keep the order of ``named``. Flat
    parameters take over the memory of their members. One of an earlier call is returned again if
    it has the same members. Raises ValueError for a parameter on the meta device, `LayoutError`
    for a partial sum.
    """
    alike: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: call flat_groups once it has memory"
            )
        kind = (parameter.dtype, parameter.device, spread_of(parameter))
        alike.setdefault(kind, []).append((name, parameter))
    _watch_steps()
    look_at_optimizers()
    return [_flat_of(piece) for group in alike.values() for piece in _pieces(group)]


def _pieces(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Split ``named`` into pieces of at most `PIECE_BYTES` on a CPU; longer tensors stay alone."""
    piece: list[tuple[str, nn.Parameter]] = []
    filled = 0
    for name, parameter in named:
        size = _bytes_on_any_rank(parameter) if is_host(parameter.device) else 0
        if size >= PIECE_BYTES:
            yield [(name, parameter)]
            continue
        if filled + size > PIECE_BYTES:
            yield piece
            piece = []
            filled = 0
        piece.append((name, parameter))
        filled += size
    if piece:
        yield piece


def _bytes_on_any_rank(parameter: nn.Parameter) -> int:
    """Bound the bytes of ``parameter`` on any rank, so that all ranks find the same pieces."""
    ranks = math.prod(axis.size for axis in spread_of(parameter))
    return -(-parameter.numel() // ranks) * parameter.element_size()


def _flat_of(named: Sequence[tuple[str, nn.Parameter]]) -> FlatGroupParameter:
    first = named[0][1]
    place = vars(first).get(_PLACE)
    if isinstance(place, _FlatPlace):
        held = [id(member.parameter) for member in place.flat.members if member.is_in_place]
        if held == [id(parameter) for _, parameter in named]:
            return place.flat
    axes: tuple[Communicator, ...] = spread_of(first)
    sizes = [local_of(parameter).numel() for _, parameter in named]
    line = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    members: list[_GroupMember] = []
    start = 0
    for (name, parameter), size in zip(named, sizes, strict=True):
        members.append(_GroupMember(name, parameter, line, start))
        start += size
    flat = FlatGroupParameter(line)
    flat.members, flat._gradient = tuple(members), None
    flat.singles = tuple(member.parameter for member in members)
    spread_over(flat, axes, is_line=True)
    for _, parameter in named:
        vars(parameter)[_PLACE] = _FlatPlace(flat)
    return flat


def flat_groups(model: nn.Module) -> list[nn.Parameter]:
    """Make as few 1-D parameters as possible from this rank's parts of what trains in ``model``.

    Each unit of `fully_shard` gives one for each dtype. Parameters outside of units, plain ones and
    DTensors of `parallelize_module`, give one for each dtype, device and set of axes that shard
    them, on a CPU in pieces of a few MiB. The parameters become views of them, and so do their
    gradients once ``.grad`` of a flat one is read. Outside of units this keeps a second copy of the
    gradients, except for long ones that stand alone.

    A parameter without a gradient (in a unit: on any rank) counts as zeros, unless no parameter of
    the flat one has a gradient. A warning names it, because momentum and weight decay still move
    it. Zero the gradients through the optimizer or the model. Use element-wise optimizers only: an
    update that depends on shapes or norms of single parameters gives other results on flat tensors.
    Call this again, and build a new optimizer, after converting the model or changing what trains.

    The number of flat parameters depends on the device and the layout: save an optimizer by the
    names of the parameters, as `meshwright.checkpoint` does.

    Raises ValueError when nothing of ``model`` trains except what `FullyShardedDataParallel`
    manages, which is flat already, or when a parameter is on the meta device.

    >>> optimizer = torch.optim.AdamW(flat_groups(fully_shard(model)))
    """
    found: list[nn.Parameter] = []
    managed: set[int] = set()
    for unit in _units(model):
        unit.exposure.refresh(unit)  # as it was converted, or loaded, since its last forward
        managed.update(id(parameter) for parameter in unit.exposure.parameters(unit))
        managed.update(id(slot.full) for group in unit.groups for slot in group.slots)
        flats = (unit.exposure.shard_of(group) for group in unit.trainable_groups)
        found += [flat for flat in flats if flat is not None]
    found += flat_parameters(
        [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in managed
        ]
    )
    if not found:
        raise ValueError(
            "expected a model with parameters that train and are not flat already, found none in "
            f"this {type(model).__name__}"
        )
    return found


def parts_of_flat(
    model: nn.Module, flat: nn.Parameter, line: torch.Tensor
) -> list[tuple[nn.Parameter, torch.Tensor]] | None:
    """Pair each parameter of ``flat`` with its part of ``line``, which has the same length.

    Parts are views of ``line``, as DTensors where the parameters are. None when ``flat`` is not one
    of the `flat_groups` of ``model``.
    """
    if isinstance(flat, FlatGroupParameter):
        return flat.parts_of(line)
    for unit in _units(model):
        for group in unit.groups:
            if parts := unit.exposure.parts_of(group, flat, line):
                return parts
    return None


def _units(model: nn.Module) -> list[Unit]:
    drivers = dict.fromkeys(d for part in model.modules() if (d := driver_of(part)) is not None)
    return [driver.unit for driver in drivers if driver.unit is not None]
