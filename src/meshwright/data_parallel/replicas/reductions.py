"""The reductions of a reducer, and the parameters that it has in common with others.

Several replicas may have a parameter in common: an encoder under two heads, or a module that was
wrapped twice. Each reduces its gradient, which gives the mean again, as long as none does it where
``.grad`` lies, and others would read what is half a sum::

    alone, views   ``.grad`` is what travels     parameters of one reducer
    buckets        copies of it travel           parameters of several
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

import torch

from meshwright.comm import Communicator
from meshwright.comm.groups.registry import PROCESS
from meshwright.data_parallel.replicas.alone import InPlaceGradient, SparseGradient
from meshwright.data_parallel.replicas.buckets import Bucket
from meshwright.data_parallel.replicas.gradient_bucket import RegisteredHook
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.slots import BucketLayout, Reduction


class Reducer(Protocol):
    """The part of a reducer that `Sharing` needs."""

    communicator: Communicator

    @property
    def is_in_backward(self) -> bool:
        """True in a backward pass that it reduces."""

    def share(self) -> None:
        """Make room for another reducer of the same parameters."""


class Sharing:
    """The parameters of a reducer that other reducers have, too; these learn of new ones."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._held: dict[int, torch.Tensor] = {}
        self._shared: set[int] = set()
        PROCESS.sharings[self] = None

    def hold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set the reducer's parameters, and tell other reducers which of them they share."""
        self._held = {id(parameter): parameter for parameter in parameters}
        self._shared.clear()
        for other, reducer in others_with(self._held.keys(), self):
            common = self._held.keys() & other._held.keys()
            self._shared |= common
            if common - other._shared:
                other._shared |= common
                reducer.share()

    def is_shared(self, parameter: torch.Tensor) -> bool:
        """Whether another reducer has ``parameter``."""
        return id(parameter) in self._shared

    def is_of_other(self, parameter: torch.Tensor) -> bool:
        """Whether another reducer has ``parameter`` and is in a backward pass."""
        found = _holders({id(parameter)}, self) if self.is_shared(parameter) else []
        return any(reducer.is_in_backward for _, reducer in found)


def _holders(ids: Set[int], own: Sharing | None) -> list[tuple[Sharing, Reducer]]:
    found: list[tuple[Sharing, Reducer]] = []
    for each in list(PROCESS.sharings):
        reducer = each._reducer()
        if each is not own and reducer is not None and not ids.isdisjoint(each._held):
            found.append((each, reducer))
    return found


def others_with(ids: Set[int], own: Sharing | None) -> list[tuple[Sharing, Reducer]]:
    """List the reducers but ``own`` that have parameters of ``ids``, the same on all ranks."""
    if _holders(ids, own):
        gc.collect()  # a wrapper that nobody holds must be gone on all ranks
    return _holders(ids, own)


def refuse_other_ranks(
    named: Sequence[tuple[str, torch.Tensor]], communicator: Communicator
) -> None:
    """Raise ValueError where a reducer over other ranks has one of the parameters ``named``."""
    names = {id(parameter): name for name, parameter in named}
    for other, reducer in others_with(names.keys(), None):
        ranks = sorted(reducer.communicator.ranks)
        if ranks != sorted(communicator.ranks):
            name = next(names[each] for each in names if each in other._held)
            raise ValueError(
                f"replicate: expected parameters that no replica over other ranks has, found "
                f"{name!r}, which is reduced over ranks {ranks} and would be over "
                f"{sorted(communicator.ranks)} here: each would undo the mean of the other. "
                "Give both the same process group, or drop the other wrapper first"
            )


def build_reductions(
    layouts: Sequence[BucketLayout],
    parameters: Sequence[torch.nn.Parameter],
    settings: ReductionSettings,
    communicator: Communicator,
    hook: RegisteredHook | None,
    *,
    is_shared: Callable[[torch.Tensor], bool],
) -> tuple[Reduction, ...]:
    """Build the reduction of each layout, whose slots count ``parameters``.

    What ``is_shared`` with other reducers is not reduced where ``.grad`` lies.
    """
    built: list[Reduction] = []
    alone: list[InPlaceGradient] = []
    zeros = settings.zeros_for_unused
    for layout in layouts:
        members = [parameters[slot.index] for slot in layout.slots]
        if layout.is_sparse:
            built.append(SparseGradient(layout, members[0], zeros_for_unused=zeros, hook=hook))
            continue
        if layout.is_alone:
            alone.append(InPlaceGradient(layout, members[0], communicator.empty_shared))
            built.append(alone[-1])
            continue
        is_view = settings.is_gradient_view and all(
            parameter.dtype == layout.dtype
            and (getattr(parameter, "grad_dtype", None) or layout.dtype) == layout.dtype
            and not is_shared(parameter)
            for parameter in members
        )
        built.append(
            Bucket(
                layout,
                members,
                communicator.empty_shared(layout.numel, layout.dtype),
                is_gradient_view=is_view,
                riders=alone if layout is layouts[-1] else (),
                zeros_for_unused=zeros,
                hook=hook,
                is_last=layout is layouts[-1],
            )
        )
    return tuple(built)
