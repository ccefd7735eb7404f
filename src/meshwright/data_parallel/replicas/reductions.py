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
from collections.abc import Callable, Iterable, Sequence

import torch

from meshwright.comm import Communicator
from meshwright.comm.groups.registry import PROCESS
from meshwright.data_parallel.replicas.alone import InPlaceGradient, SparseGradient
from meshwright.data_parallel.replicas.buckets import Bucket
from meshwright.data_parallel.replicas.gradient_bucket import RegisteredHook
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.slots import BucketLayout, Reduction


class Sharing:
    """The parameters of a reducer that others have, too; ``changed`` is called for more of them."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = weakref.WeakMethod(changed)
        self._held: dict[int, torch.Tensor] = {}
        self._shared: set[int] = set()
        PROCESS.sharings[self] = None

    def hold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have ``parameters`` from now on."""
        self._held = {id(parameter): parameter for parameter in parameters}
        self._shared.clear()
        if any(map(self._in_common, list(PROCESS.sharings))):
            gc.collect()  # a wrapper that nobody has any more is to be gone on all ranks alike
        for other in list(PROCESS.sharings):
            common = self._in_common(other)
            self._shared |= common
            if common - other._shared:
                other._shared |= common
                changed = other._changed()
                if changed is not None:
                    changed()

    def _in_common(self, other: Sharing) -> set[int]:
        return set() if other is self else self._held.keys() & other._held.keys()

    def is_shared(self, parameter: torch.Tensor) -> bool:
        """Tell whether another reducer has ``parameter``."""
        return id(parameter) in self._shared


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
            parameter.dtype == layout.dtype and not is_shared(parameter) for parameter in members
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
