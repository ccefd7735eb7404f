"""The axes over which ranks read different data, behind one face: replicated or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from meshwright.comm import Communicator
from meshwright.composition.description import Description, describe_replicated, describe_sharded
from meshwright.data_parallel import Replica, keep_batch_norm_local
from meshwright.data_parallel.modules.equal_buffers import EqualBuffers
from meshwright.data_parallel.shards.unit import Unit
from meshwright.gradients import SpreadGradients, group_by_spread
from meshwright.plan import Plan

__all__ = ["DataLayout", "ReplicatedLayout", "ShardedLayout"]


class DataLayout(Protocol):
    """The way in which parameters and gradients lie on the ranks, as a training step needs it."""

    communicators: Mapping[str, Communicator]
    """By the name of their axis."""

    @property
    def found_non_finite(self) -> Sequence[str]:
        """Parameters whose gradient on this rank was not finite, in the last backward pass.

        In the order of that pass: what comes first is nearest to the cause.
        """
        ...

    def reduce_next(self, is_wanted: bool) -> None:
        """Set whether the next forward and backward pass leads to a reduction."""
        ...

    def scale_by(self, scale: Callable[[], float]) -> None:
        """Multiply summed gradients by ``scale()``; it is asked once they are there."""
        ...

    def gradients(self) -> list[SpreadGradients]:
        """This rank's parts of all gradients."""
        ...

    def has_buffers(self) -> bool:
        """Tell whether the module has buffers now, which follow rank 0."""
        ...

    def synchronise_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""
        ...

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        """Find the layout, in words and numbers."""
        ...


class ReplicatedLayout:
    """Every rank holds the whole model."""

    def __init__(self, replica: Replica, module: nn.Module, *, is_cut: bool) -> None:
        """``is_cut`` says that parameters of ``module`` are cut over ranks of axis tensor."""
        self._replica = replica
        self._module = module
        self._is_cut = is_cut
        self.communicators: Mapping[str, Communicator] = {"replicate": replica.communicator}
        keep_batch_norm_local(module)  # or the plan has changed what it computes

    @property
    def found_non_finite(self) -> Sequence[str]:
        """See `DataLayout`."""
        return self._replica.reducer.found_non_finite

    def reduce_next(self, is_wanted: bool) -> None:
        """See `DataLayout`."""
        self._replica.reducer.want(is_wanted)

    def scale_by(self, scale: Callable[[], float]) -> None:
        """See `DataLayout`."""
        self._replica.reducer.scale_by(scale)

    def gradients(self) -> list[SpreadGradients]:
        """See `DataLayout`."""
        if self._is_cut:
            return group_by_spread(self._module.parameters())
        return [SpreadGradients(gradients=self._replica.reducer.gradients())]

    def has_buffers(self) -> bool:
        """See `DataLayout`."""
        return bool(self._replica.buffers.look())

    def synchronise_buffers(self) -> None:
        """See `DataLayout`."""
        self._replica.buffers.synchronise()

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        """See `DataLayout`."""
        return describe_replicated(module, plan, self._replica)


class ShardedLayout:
    """Every rank holds a part of each parameter, over axis shard, and perhaps replicate too."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        data: Communicator,
        communicators: Mapping[str, Communicator],
    ) -> None:
        """``data`` are the ranks that read different shares of a batch."""
        self._module = module
        self._units = tuple(units)
        self._data = data
        self.communicators = communicators
        self._buffers = EqualBuffers(module, data)
        keep_batch_norm_local(module)  # or the plan has changed what it computes
        for unit in units:
            unit.change(is_watched=True)

    @property
    def found_non_finite(self) -> Sequence[str]:
        """See `DataLayout`."""
        return [name for unit in reversed(self._units) for name in unit.found_non_finite]

    def reduce_next(self, is_wanted: bool) -> None:
        """See `DataLayout`."""
        for unit in self._units:
            if unit.settings.synchronise is not is_wanted:
                unit.change(synchronise=is_wanted)

    def scale_by(self, scale: Callable[[], float]) -> None:
        """See `DataLayout`."""
        for unit in self._units:
            unit.change(scale=scale)

    def gradients(self) -> list[SpreadGradients]:
        """See `DataLayout`."""
        return group_by_spread(self._module.parameters())

    def has_buffers(self) -> bool:
        """See `DataLayout`."""
        return bool(self._buffers.look())

    def synchronise_buffers(self) -> None:
        """See `DataLayout`."""
        self._buffers.synchronise()

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        """See `DataLayout`."""
        return describe_sharded(
            module, plan, self._units, self._data, has_buffers=self.has_buffers()
        )
