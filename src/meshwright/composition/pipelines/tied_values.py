"""Tied parameters of a pipeline between its steps: one parameter for all readers and writers.

Stages that share a parameter compute with copies, each with its own gradient. On one rank, the
copies exist only during a step and begin it with the values of the first; otherwise the modules
have the first itself, under all of its names::

    between steps          embed.weight is head.weight        hooks, optimizers, writes: one
    from batch to update   embed.weight, copy as head.weight  a gradient each, which are summed

Copies on other ranks must be written there: each rank lists its own by the parameter's first name.
Each step detects a copy that was written on some ranks only, by two numbers sent with the losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import local_of
from meshwright.errors import LayoutError
from meshwright.pipelining import Tie

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
    """The weight of this rank's value; the weights of all pipeline ranks sum to zero."""


class TiedValues:
    """The tied parameters of the stages of one rank."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        stage_ranks: Sequence[int],
        data_size: int,
    ) -> None:
        """Replace copies in this rank's ``stages`` by the first; ``stage_ranks`` are global."""
        self._ranks = tuple(stage_ranks)
        self._data_size = data_size
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
        """Keep the copies in the modules for the block."""
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
            if abs(apart) > _ROUNDING.get(dtype, _COARSE) * size / self._data_size:
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
            rows, columns = (torch.arange(1, n + 1, device=flat.device) for n in flat.shape)
            self._directions[flat.shape] = (torch.cos(2.0 * rows), torch.cos(3.0 * columns))
        rows, columns = self._directions[flat.shape]
        size = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return torch.mv(flat, columns.to(flat)).dot(rows.to(flat)).double(), size
