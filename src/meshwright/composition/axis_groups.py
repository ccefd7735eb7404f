"""With whom a rank does what: the ranks along the axes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright import comm
from meshwright.axes import DATA_AXES
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import mesh_over
from meshwright.mesh import DeviceMesh
from meshwright.plan import Plan

_MESHED = ("replicate", "shard", "tensor")
"""Axes over which parameters lie. What is cut last lies innermost, whatever the order of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The communicators of one rank; each holds the rank itself."""

    everyone: Communicator
    """All ranks of the plan."""
    data: Communicator
    """Ranks that read different shares of a batch."""
    losses: Communicator
    """Ranks whose losses add up to that of the global batch: one of each tensor axis."""
    alike: Communicator
    """Ranks that are given the same share of a batch."""
    pipeline: Communicator
    tensor: Communicator
    mesh: DeviceMesh | None
    """Of the axes over which parameters lie, those with more than one rank; None where copies of
    whole ones are all there is."""

    @classmethod
    def of(cls, plan: Plan, everyone: Communicator) -> Peers:
        """Find the peers of the calling rank. All ranks of ``everyone`` call it together."""

        def along(axes: Sequence[str], name: str) -> Communicator:
            numbers = plan.axes.peers(everyone.rank, axes)
            for single in axes:  # one axis alone is known by its own name
                if numbers == plan.axes.peers(everyone.rank, single):
                    name = single
                    break
            return comm.peers(everyone, [everyone.ranks[number] for number in numbers], name)

        names = [name for name in _MESHED if plan.axes.size(name) > 1]
        return cls(
            everyone=everyone,
            data=along(DATA_AXES, "data"),
            losses=along((*DATA_AXES, "pipeline"), "losses"),
            alike=along(("tensor", "pipeline"), "alike"),
            pipeline=along(("pipeline",), "pipeline"),
            tensor=along(("tensor",), "tensor"),
            mesh=mesh_over(everyone, plan.axes, names)
            if names not in ([], ["replicate"])
            else None,
        )

    def mesh_of(self, *names: str) -> DeviceMesh | None:
        """Find the part of the mesh along ``names``, but for axes of one rank."""
        known = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        wanted = tuple(name for name in known if name in names)
        if self.mesh is None or not wanted:
            return None
        return self.mesh if wanted == known else self.mesh[wanted]
