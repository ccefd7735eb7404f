"""The user's model, whose stages are on different ranks.

This rank's stages use the model's own tensors, so that hooks, attributes and optimizers of a
parameter stay valid. Tracing and tensor parallelism replace tensors in modules, so model and stages
are matched before a stage is laid out, and after::

    share     the model's tensors  ->  the stages of this rank
    show      the tensors of the stages now (DTensors, if sharded)  ->  the model's modules

Tensors of other ranks stay the same objects, without values; reading one raises an error that says
where it is.

Stages that share a parameter compute with copies, each with its own gradient. On one rank, the
copies exist only during a step and begin it with the values of the first; otherwise the modules
have the first itself, under all of its names::

    between steps          embed.weight is head.weight        one set of hooks, optimizers, writes
    from batch to update   embed.weight, copy as head.weight  a gradient each, which are summed

Copies on other ranks must be written there: each rank lists its own by the parameter's first name.
Each step detects a copy that was written on some ranks only, by two numbers sent with the losses.

A pipeline calls the stages of a model and not the modules that it took apart, and a backward has
the gradient of one microbatch on one rank. So a hook on such a module would never run, a hook of a
parameter would see a part of its gradient, and a tensor that was assigned to such a module would
not be used. `CutGuard` looks for them at the start of each step: each raises on this rank, and the
schedule tells the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import hooks_in
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.unreadable import SETTINGS, make_unreadable
from meshwright.composition.stages import CutModel
from meshwright.errors import LayoutError
from meshwright.pipelining import Tie
from meshwright.pipelining.ties import copy_parameter
from meshwright.torch_internals.autograd import after_hooks_of, backward_hooks_of
from meshwright.torch_internals.modules import HOOKS, STEPPERS

_ELSEWHERE = "_meshwright_elsewhere"

_REMEDY = (
    "A loss can read what the last stage holds: compute what needs other parameters in the model's "
    "forward, and return it with the output. `Trainable.weights` gives all values, and "
    "`Trainable.eval` runs the whole model"
)


def share(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Put the parameters and buffers of ``model`` into ``stages``, all of this rank, by name.

    If several of them share a parameter, the first has the model's, and others copies: each
    accumulates a gradient of its own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    taken: set[int] = set()
    for stage in stages:
        used: dict[int, nn.Parameter] = {}
        for path, part in stage.named_modules():
            prefix = f"{path}." if path else ""
            for leaf in part._parameters:
                own = parameters.get(f"{prefix}{leaf}")
                if own is None:
                    continue
                if id(own) not in used:
                    used[id(own)] = copy_parameter(own) if id(own) in taken else own
                part._parameters[leaf] = used[id(own)]
            for leaf in part._buffers:
                part._buffers[leaf] = buffers.get(f"{prefix}{leaf}", part._buffers[leaf])
        taken |= used.keys()


def show(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Put the tensors of ``stages``, all of this rank, into the modules of ``model``, by name.

    If a stage has all of a module, both share its dict, so that the model shows unsharded
    parameters while the stage has them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # Backwards, so that a module of several stages ends with the first one's tensors.
    for stage in reversed(stages):
        for path, part in stage.named_modules():
            owner = modules.get(path)
            if owner is None or owner is part:
                continue
            for table in ("_parameters", "_buffers"):
                mine, theirs = getattr(part, table), getattr(owner, table)
                absent = {key: None for key, tensor in theirs.items() if tensor is None}
                if mine.keys() | absent.keys() == theirs.keys():
                    mine.update(absent)
                    setattr(owner, table, mine)
                else:
                    theirs.update({key: mine[key] for key in mine.keys() & theirs.keys()})


def let_go(
    model: nn.Module, stages: Sequence[nn.Module], mine: Sequence[int], ranks: Sequence[int]
) -> None:
    """Free the tensors of ``model`` that belong to ``stages`` other than ``mine``.

    ``ranks`` are the stages' ranks. A tensor of no stage, such as an unused buffer, is kept.
    """
    held = {id(tensor) for stage in mine for _, tensor in _named_tensors(stages[stage])}
    asked = f"on rank {ranks[mine[0]]}, which has stage {', '.join(map(str, mine))}"
    where = {
        name: f"is held by stage {number}, on rank {ranks[number]}; its value was asked for {asked}"
        for number, stage in enumerate(stages)
        if number not in mine
        for name, _ in _named_tensors(stage)
    }
    for name, tensor in _named_tensors(model):
        if id(tensor) not in held and name in where and not is_elsewhere(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            text = f"{kind} {name!r} {where[name]}"
            make_unreadable(tensor, text, _REMEDY, error=LayoutError, settings=SETTINGS)
            vars(tensor)[_ELSEWHERE] = True


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def is_elsewhere(tensor: object) -> bool:
    """Whether ``tensor`` belongs to a stage on another rank."""
    return isinstance(tensor, torch.Tensor) and _ELSEWHERE in vars(tensor)


_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By dtype, the tolerated relative difference of copies; half precision has `_COARSE`."""
_COARSE = 5e-2


class _TiePlace(NamedTuple):
    """Where a module of this rank has a copy during a step."""

    table: dict[str, Any]
    """The module's ``_parameters``."""
    leaf: str
    owner: nn.Parameter
    """The same parameter in the first stage of this rank that has it."""
    copied: nn.Parameter
    name: str


class _Spread(NamedTuple):
    """A parameter that stages of several ranks share."""

    tie: Tie
    held: nn.Parameter | None
    """This rank's copy."""
    weight: float
    """The weight of this rank's value; those of all ranks that have a copy sum to zero."""


class TiedValues:
    """The tied parameters of the stages of one rank."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        stage_ranks: Sequence[int],
        summed: int,
    ) -> None:
        """Replace copies in this rank's ``stages`` by the first; ``stage_ranks`` are global.

        ``summed`` is the number of ranks that have each stage.
        """
        self._ranks = tuple(stage_ranks)
        self._summed = summed
        self._places: list[_TiePlace] = []
        self._spread: list[_Spread] = []
        self._directions: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
        for tie in ties:
            mine = [(stages[s], s, stages[s].get_parameter(n)) for s, n in tie.names if s in stages]
            held = mine[0][2] if mine else None
            for module, stage, copied in mine[1:]:
                self._add(module, copied, mine[0][2], dict(tie.names)[stage])
            ranks = {self._ranks[stage] for stage, _ in tie.names}
            if len(ranks) > 1:
                has_owner = any(stage == tie.owner for _, stage, _ in mine)
                self._spread.append(_Spread(tie, held, len(ranks) - 1.0 if has_owner else -1.0))
        self.leave()

    def _add(self, module: nn.Module, copied: nn.Parameter, owner: nn.Parameter, name: str) -> None:
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is copied:
                    self._places.append(_TiePlace(part._parameters, leaf, owner, copied, name))

    # ---------------------------------------------------------------------------- one rank

    @torch.no_grad()
    def enter(self) -> None:
        """Put the copies, with current values, into the modules of this rank.

        Raises LayoutError for a parameter that was replaced in its module.
        """
        if self._is_inside:
            return
        for table, leaf, owner, copied, name in self._places:
            if table.get(leaf) is not owner:
                raise LayoutError(
                    f"parameter {name!r} was given anew after parallelize, and the optimizer and "
                    "the reductions know the former: write the values into that (copy_), load them "
                    "by Trainable.load_state_dict, or do it before"
                )
            copied.requires_grad_(owner.requires_grad)
            local_of(copied).copy_(local_of(owner))
        # In a loop of its own: if the one above raises, no module has changed.
        for table, leaf, _, copied, _ in self._places:
            table[leaf] = copied
        self._is_inside = True

    def leave(self) -> None:
        """Replace the copies by the first parameter."""
        for table, leaf, owner, _, _ in self._places:
            table[leaf] = owner
        self._is_inside = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Keep the copies in the modules inside the block."""
        was_inside = self._is_inside
        self.enter()
        try:
            yield
        finally:
            if not was_inside:
                self.leave()

    # -------------------------------------------------------------------------- several ranks

    @torch.no_grad()
    def numbers(self) -> list[torch.Tensor]:
        """Compute two numbers for each shared parameter, whose sums over ranks `check` reads."""
        found: list[torch.Tensor] = []
        for _, held, weight in self._spread:
            if held is None:
                found += [torch.zeros((), device="cpu")] * 2
                continue
            along, size = self._measure(local_of(held.detach()))
            found += [weight * along, size]
        return found

    def check(self, sums: Sequence[float]) -> None:
        """Raise LayoutError, on all ranks alike, if ``sums`` show that copies differ."""
        pairs = zip(sums[::2], sums[1::2], strict=True)
        for (tie, held, _), (apart, size) in zip(self._spread, pairs, strict=True):
            dtype = torch.float32 if held is None else held.dtype
            if abs(apart) > _ROUNDING.get(dtype, _COARSE) * size / self._summed:
                ranks = sorted({self._ranks[stage] for stage, _ in tie.names})
                raise LayoutError(
                    f"parameter {tie.names[0][1]!r} is held by stages "
                    f"{[stage for stage, _ in tie.names]}, on ranks {ranks}, whose values differ: "
                    "it was written between steps on some of these ranks only, or to other values. "
                    "Write the same on every rank that holds it, as a loop over "
                    "Trainable.named_parameters() on all ranks does"
                )

    def _measure(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project a tensor on a direction that depends on its shape; also returns its norm."""
        if not local.numel():
            return (local.new_zeros((), dtype=torch.float64),) * 2
        if local.is_complex():
            local = torch.view_as_real(local)
        flat = local.reshape(local.shape[0] if local.dim() else 1, -1)
        if flat.shape not in self._directions:
            # Any direction will do that depends on every element and is the same on all ranks.
            rows, columns = (torch.arange(1, n + 1, device=flat.device) for n in flat.shape)
            self._directions[flat.shape] = (torch.cos(2.0 * rows), torch.cos(3.0 * columns))
        rows, columns = self._directions[flat.shape]
        size = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return torch.mv(flat, columns.to(flat)).dot(rows.to(flat)).double(), size


class CutGuard:
    """The modules and parameters of a model as they were when its stages were laid out."""

    def __init__(
        self, model: nn.Module, found: CutModel, mine: Sequence[nn.Module], *, is_sharded: bool
    ) -> None:
        """``mine`` are the stages of this rank; ``is_sharded``: units replace their parameters."""
        kept = {part for stage in found.modules for part in stage.modules()}
        apart = [(name, part) for name, part in model.named_modules() if part not in kept]
        self._hooks = [
            (getattr(part, kind), len(getattr(part, kind)), f"{what} on {_called(name, part)}")
            for name, part in apart
            for kind, what in HOOKS.items()
        ]
        self._modes = [
            (part, part.training, _called(name, part))
            for name, part in apart
            if found.info is not None
        ]
        """Stages of a graph have a mode of their own; those of a chain are the model's modules."""
        own = {id(table) for part in kept for table in (part._parameters, part._buffers)}
        tables = [
            (name, table)
            for name, part in apart
            for table in (part._parameters, part._buffers)
            if id(table) not in own  # else what is assigned reaches the stage
        ]
        if not is_sharded:
            tables += [(n, p._parameters) for each in mine for n, p in each.named_modules()]
        self._tensors = [
            (table, key, tensor, f"{name}.{key}".lstrip("."))
            for name, table in tables
            for key, tensor in table.items()
        ]
        self._parameters = [
            (parameter, len(hooks_in(after_hooks_of(parameter))), name)
            for stage in mine
            for name, parameter in stage.named_parameters()
        ]
        """Each with the number of its hooks now, which are those of a reducer."""

    def check(self) -> None:
        """Raise LayoutError for a hook, a tensor or a mode that the stages would not follow."""
        for hooks, count, what in self._hooks:
            if len(hooks) > count:
                raise LayoutError(
                    f"a {what}, which no stage calls, would never run: put it on a "
                    "module in one of `Trainable.entries`, the stages of this rank"
                )
        for part, mode, name in self._modes:
            if part.training is not mode:
                raise LayoutError(
                    f"the mode of {name} was changed, which was traced into stages with a mode of "
                    "their own: call train() of `Trainable.module`. `Trainable.eval` needs neither"
                )
        for table, key, tensor, name in self._tensors:
            if table.get(key, tensor) is not tensor:
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise LayoutError(
                    f"{what} {name!r} was given anew after parallelize (by assignment, or "
                    "load_state_dict(assign=True)), and the stages, the optimizer and the "
                    "reductions know the former: write the values into that (copy_), load them by "
                    "Trainable.load_state_dict, or do it before"
                )
        for parameter, count, name in self._parameters:
            after = hooks_in(after_hooks_of(parameter))
            is_hooked = backward_hooks_of(parameter) or len(after) > count
            if is_hooked or STEPPERS in vars(parameter):
                raise LayoutError(hooked(name))


def hooked(name: str) -> str:
    """The text of the error for hooks on a parameter's gradient."""
    return (
        f"parameter {name!r} has a hook on its gradient, or an optimizer that steps in the "
        "backward. A backward under axis pipeline has the gradient of one microbatch on one rank, "
        "which the hook would take for the whole: remove it, and change the gradients of "
        "`Trainable.named_parameters` between forward_backward and optimizer_step, or clip them by "
        "[train] clip_norm"
    )


def _called(name: str, part: nn.Module) -> str:
    return f"module {name or type(part).__name__!r}"
