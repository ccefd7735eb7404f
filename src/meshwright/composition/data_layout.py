"""The ranks along the axes of a plan, and one interface to all data-parallel layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright import comm
from meshwright.axes import DATA_AXES, SUM_AXES
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import mesh_beside, mesh_communicators, mesh_over
from meshwright.comm.dtensors.sharded_axes import local_part
from meshwright.composition.description import (
    Description,
    describe_lone,
    describe_replicated,
    describe_sharded,
)
from meshwright.data_parallel import Replica, keep_batch_norm_local
from meshwright.data_parallel.modules.module_tensors import EqualBuffers
from meshwright.data_parallel.shards.unit import Unit
from meshwright.gradients import (
    Factor,
    NonFiniteValues,
    SpreadGradients,
    group_by_spread,
    non_finite_gradients,
)
from meshwright.mesh import DeviceMesh
from meshwright.plan import Plan


class DataLayout(ABC):
    """How parameters and gradients are placed on the ranks, as a training step needs it."""

    def __init__(
        self,
        module: nn.Module,
        communicators: Mapping[str, Communicator],
        buffers: Iterable[EqualBuffers],
    ) -> None:
        self._module = module
        self.communicators = communicators
        """The communicators of the layout, by axis name."""
        self.buffers = tuple(buffers)
        """Buffers that are kept equal to rank 0's."""

    @property
    @abstractmethod
    def found_non_finite(self) -> Sequence[str]:
        """Parameters whose gradient on this rank was not finite in the last backward pass.

        In the order of that pass: the first is nearest to the cause.
        """

    @abstractmethod
    def reduce_next(self, is_wanted: bool) -> None:
        """Set whether the next backward pass reduces gradients."""

    @abstractmethod
    def scale_by(self, scale: Callable[[], Factor]) -> None:
        """Multiply summed gradients by ``scale()``, which is called once they are complete."""

    def gradients(self) -> list[SpreadGradients]:
        """List this rank's parts of all gradients."""
        return group_by_spread(self._module.parameters())

    def buffers_now(self) -> list[EqualBuffers]:
        """List the `buffers` that have any tensors now."""
        return list(filter(EqualBuffers.look, self.buffers))

    @abstractmethod
    def describe(self, module: nn.Module, plan: Plan) -> Description:
        """Describe parameters, collectives of one step, and settings, as this rank has them."""


class ReplicatedLayout(DataLayout):
    """The full model on every rank."""

    def __init__(self, replica: Replica, module: nn.Module, *, is_cut: bool) -> None:
        """``is_cut``: parameters of ``module`` are sharded over axis expert or tensor."""
        super().__init__(module, {"replicate": replica.communicator}, (replica.buffers,))
        self._replica = replica
        self._is_cut = is_cut
        keep_batch_norm_local(module)  # no warning: the plan has chosen the statistics

    @property
    def found_non_finite(self) -> Sequence[str]:
        return self._replica.reducer.found_non_finite

    def reduce_next(self, is_wanted: bool) -> None:
        self._replica.want(is_wanted)

    def scale_by(self, scale: Callable[[], Factor]) -> None:
        self._replica.reducer.scale = scale

    def gradients(self) -> list[SpreadGradients]:
        if self._is_cut:
            return super().gradients()
        return [SpreadGradients(gradients=self._replica.reducer.gradients())]

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        return describe_replicated(module, plan, self._replica)


class ShardedLayout(DataLayout):
    """A shard of each parameter on every rank, over axis shard and possibly replicate."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        sums: Communicator,
        communicators: Mapping[str, Communicator],
    ) -> None:
        """``sums`` are the ranks over which gradients are summed."""
        super().__init__(module, communicators, (EqualBuffers(module, sums),))
        self._units = tuple(units)
        self._sums = sums
        keep_batch_norm_local(module)  # no warning: the plan has chosen the statistics
        for unit in units:
            unit.change(is_watched=True)

    @property
    def found_non_finite(self) -> Sequence[str]:
        return [name for unit in reversed(self._units) for name in unit.found_non_finite]

    def reduce_next(self, is_wanted: bool) -> None:
        for unit in self._units:
            if unit.settings.synchronize is not is_wanted:
                unit.change(synchronize=is_wanted)

    def scale_by(self, scale: Callable[[], Factor]) -> None:
        for unit in self._units:
            unit.change(scale=scale)

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        has_buffers = bool(self.buffers_now())
        return describe_sharded(module, plan, self._units, self._sums, has_buffers=has_buffers)


class LoneLayout(DataLayout):
    """A module, or its shard on axis tensor, whose gradients are not summed over ranks.

    Either no other rank has it, or it trains nothing, and its buffers follow the first rank's.
    """

    def __init__(self, module: nn.Module, peers: LayoutCommunicators) -> None:
        alone = peers.sums.is_alone
        super().__init__(module, {}, () if alone else (EqualBuffers(module, peers.sums),))
        self._rank = peers.everyone.rank
        self._is_on_host = peers.everyone.is_on_host
        self._values = NonFiniteValues()

    @property
    def found_non_finite(self) -> Sequence[str]:
        if self._is_on_host:
            return non_finite_gradients(self._module.named_parameters())
        return self._values.names()

    def gradients(self) -> list[SpreadGradients]:
        """See `DataLayout`. On a device also checks that they are finite, before they are freed."""
        if not self._is_on_host:
            named = reversed(list(self._module.named_parameters()))
            held = [(name, local_part(p.grad)) for name, p in named if p.grad is not None]
            self._values.clear()
            if held:
                self._values.look(held[0][1], lambda: held)
        return super().gradients()

    def reduce_next(self, is_wanted: bool) -> None:
        """See `DataLayout`. There is nothing to reduce."""

    def scale_by(self, scale: Callable[[], Factor]) -> None:
        """See `DataLayout`. Nothing is summed here."""

    def describe(self, module: nn.Module, plan: Plan) -> Description:
        return describe_lone(module, self._rank)


_CUTTING = ("shard", "context", "expert")
"""Axes over which parameters are sharded where axis shard is: experts over all but their own."""

_ALIKE = ("tensor", "context", "pipeline")
"""Axes whose ranks read the same share of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCommunicators:
    """The communicators of one rank, along and across the axes of a plan."""

    everyone: Communicator
    """All ranks of the plan."""
    data: Communicator
    """Ranks that read different shares of a batch."""
    sums: Communicator
    """Ranks over which gradients of dense parameters are summed."""
    losses: Communicator
    """Ranks whose losses sum to that of the global batch: one for each tensor group."""
    alike: Communicator
    """Ranks that get the same share of a batch."""
    passes: Communicator
    """Ranks whose passes depend on each other's: those, and the ranks that hold other experts."""
    pipeline: Communicator
    tensor: Communicator
    context: Communicator | None
    """Ranks that compute parts of the same sequences; None with one rank."""
    expert: Communicator | None
    """Ranks that hold different experts, and exchange samples; None with one rank."""
    mesh: DeviceMesh | None
    """The mesh of all axes but pipeline that have more than one rank, replicate first whatever the
    order of ranks; None if that is at most replicate."""
    dense: DeviceMesh | None
    """The same ranks, as parameters other than experts are placed on them: where axis shard has
    several, it is one dim with context and expert."""

    @classmethod
    def of(cls, plan: Plan, everyone: Communicator) -> LayoutCommunicators:
        """Make the communicators of the calling rank. All ranks of ``everyone`` must call this."""

        def along(axes: Sequence[str], name: str) -> Communicator:
            numbers = plan.axes.peers(everyone.rank, axes)
            for single in axes:  # one axis alone is known by its own name
                if numbers == plan.axes.peers(everyone.rank, single):
                    name = single
                    break
            return comm.peers(everyone, [everyone.ranks[number] for number in numbers], name)

        def several(axis: str) -> Communicator | None:
            return along((axis,), axis) if plan.axes.size(axis) > 1 else None

        # In the order of ranks, so that a dim of several has that of its group.
        cutting = tuple(n for n in plan.axes.names if n in _CUTTING and plan.axes.size(n) > 1)
        first, last = ([(n,)] if plan.axes.size(n) > 1 else [] for n in ("replicate", "tensor"))
        dims = [*first, *((name,) for name in cutting), *last]
        mesh = dense = mesh_over(everyone, plan.axes, dims) if dims not in ([], first) else None
        if "shard" in cutting and len(cutting) > 1:
            dense = mesh_over(everyone, plan.axes, [*first, cutting, *last])
        return cls(
            everyone=everyone,
            data=along(DATA_AXES, "data"),
            sums=along(SUM_AXES, "data"),
            losses=along((*SUM_AXES, "pipeline"), "losses"),
            alike=along(_ALIKE, "alike"),
            passes=along((*_ALIKE, "expert"), "alike"),
            pipeline=along(("pipeline",), "pipeline"),
            tensor=along(("tensor",), "tensor"),
            context=several("context"),
            expert=several("expert"),
            mesh=mesh,
            dense=dense,
        )

    def mesh_of(self, *names: str) -> DeviceMesh | None:
        """The submesh along those ``names`` that have more than one rank; None without any."""
        return _part_of(self.mesh, names)

    @property
    def cutting(self) -> Sequence[Sequence[Communicator]]:
        """Axes over which elements of dense parameters may be spread, and of experts."""
        tensor = () if self.tensor.is_alone else (self.tensor,)
        dense, left = tuple[Communicator, ...](), tuple[Communicator, ...]()
        experts = self.mesh_of("expert")
        if self.sharding is not None and self.mesh_of("shard") is not None:
            dense = mesh_communicators(self.sharding)[-1:]
            beside = None if experts is None else mesh_beside(experts, dense[0].ranks)
            left = () if beside is None else mesh_communicators(beside)
        if self.expert is None:
            return ((*dense, *tensor),)
        return (*dense, *tensor), (*left, self.expert, *tensor)

    @property
    def sharding(self) -> DeviceMesh | None:
        """The submesh over which dense parameters are replicated and sharded."""
        known = () if self.dense is None else self.dense.mesh_dim_names or ()
        return _part_of(self.dense, [name for name in known if name != "tensor"])


def _part_of(mesh: DeviceMesh | None, names: Sequence[str]) -> DeviceMesh | None:
    known = () if mesh is None else mesh.mesh_dim_names or ()
    wanted = tuple(name for name in known if name in names)
    if mesh is None or not wanted:
        return None
    return mesh if wanted == known else mesh[wanted]
