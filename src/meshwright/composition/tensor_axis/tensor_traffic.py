"""The traffic of a step over axis tensor, as one pass over the example has sent it.

What modules send depends on styles, recomputation and autocast, so it is seen and not derived: one
forward and one backward of the model as it will train. A step has as many of them as it has parts
of a batch, then gradients that are parts of a sum over the ranks, then the norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.composition.description import Description
from meshwright.data_parallel.distributed_parameters import local_parameters
from meshwright.gradients import SpreadGradients
from meshwright.timeline import Collective

__all__ = ["TensorTraffic", "add_traffic"]

PARTIAL = "partial gradients"
"""The label of sums that belong to no single module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """The messages of modules over one axis in one pass, by direction, in order."""

    axis: Communicator
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]

    def inside(self, stages: Iterable[nn.Module]) -> TensorTraffic:
        """Find that of the modules in ``stages``, which one rank has."""
        names = {name for stage in stages for name, _ in stage.named_modules()}
        mine = [
            tuple(c for c in each if c.label.rpartition(" ")[0] in names)
            for each in (self.forward, self.backward)
        ]
        return replace(self, forward=mine[0], backward=mine[1])

    def of_step(self, module: nn.Module, passes: int, sums: int) -> Iterator[Collective]:
        """List the collectives of ``passes`` passes, with ``sums`` sums of partial gradients."""
        partial = list(self._partial(module))
        for number in range(passes):
            yield from self.forward
            yield from self.backward
            if number >= passes - sums:
                yield from partial

    def _partial(self, module: nn.Module) -> Iterator[Collective]:
        """One sum for each dtype of the parameters whose gradients are parts of it."""
        known = local_parameters(module)
        sizes: dict[torch.dtype, int] = {}
        for parameter in module.parameters():
            found = known.get(id(parameter))
            if parameter.requires_grad and found is not None and found.partial is not None:
                size = sizes.get(parameter.dtype, 0)
                sizes[parameter.dtype] = size + local_of(parameter).numel()
        for dtype, size in sizes.items():
            if size:
                yield Collective(
                    kind="all_reduce",
                    axis=self.axis.axis,
                    shape=(size,),
                    dtype=str(dtype).removeprefix("torch."),
                    reduction="sum",
                    label=PARTIAL,
                )


def add_traffic(
    described: Description,
    traffic: Collection[Collective],
    spread: Collection[SpreadGradients],
) -> Description:
    """``described`` with what modules send in a step, and with the norm of all gradients.

    ``spread`` says over which axes gradients lie.
    """
    axes = dict.fromkeys(axis for group in spread for axis in group.communicators)
    norm = Collective(
        kind="all_reduce",
        axis="+".join(axis.axis for axis in axes),
        dtype="float64",
        reduction="sum",
        label="gradient norm",
    )
    everything = [*described.collectives, *traffic, *([norm] if axes else [])]
    note = (
        "axis tensor: what modules send was seen in one pass over the example; a part of a batch "
        "of another size sends as much more or less"
    )
    return replace(
        described,
        collectives=tuple(replace(each, sequence=n) for n, each in enumerate(everything)),
        settings=(*described.settings, *([note] if traffic else [])),
    )
