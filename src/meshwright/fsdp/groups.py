"""The process groups of a strategy: ranks that shard a unit's parameters, and ranks with copies."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

from meshwright.comm import Communicator, communicator, subgroup
from meshwright.data_parallel.shards.buffer import DataAxes
from meshwright.environment import local_size
from meshwright.errors import warn
from meshwright.fsdp.options import ShardingStrategy, own_member, row_of
from meshwright.mesh import DeviceMesh

SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The strategy in force, and the communicators of its axes."""

    strategy: ShardingStrategy
    shard: Communicator
    """Named after its role also where nothing is sharded: then all hold the whole."""
    replicate: Communicator | None = None
    """Of a hybrid strategy."""
    mesh: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    """The mesh of the DTensors that parameters were before, beside ``mesh``."""

    @property
    def axes(self) -> DataAxes:
        """The axes over which the engine places parameters."""
        if row_of(self.strategy).is_sharded:
            return DataAxes(shard=self.shard, replicate=self.replicate)
        return DataAxes(replicate=communicator(self.shard.group, REPLICATE))

    @property
    def process_group(self) -> Any:  # noqa: ANN401 - c10d's types stay in comm
        """The value of the argument ``process_group`` that gives these groups."""
        if self.replicate is None:
            return self.shard.group
        return (self.shard.group, self.replicate.group)


def hybrid_process_groups(
    global_pg: Any,  # noqa: ANN401 - c10d's types stay in comm
    devices_per_node: int,
) -> tuple[Any, Any]:
    """Return the groups ``(shard, replicate)`` of this rank: within its node, and over the nodes.

    Every rank of the world calls it. Groups that exist already are reused. Raises ValueError
    when the ranks do not fill their nodes.
    """
    world = communicator(global_pg)
    size = devices_per_node
    if size < 1 or world.size % size:
        raise ValueError(
            f"expected ranks that fill nodes of {size}, found {world.size} ranks: pass the groups "
            "as process_group=(shard, replicate), or a 2-D device_mesh"
        )
    ranks = world.ranks
    nodes = [ranks[start : start + size] for start in range(0, world.size, size)]
    peers = [ranks[local::size] for local in range(size)]
    return subgroup(world, nodes, SHARD).group, subgroup(world, peers, REPLICATE).group


def devices_per_node(world: Communicator) -> int:
    """Count the ranks of ``world`` on this machine: from torchrun, otherwise by host name."""
    if given := local_size():
        return given
    hosts = Counter(world.gather_bytes(socket.gethostname().encode(), label="host names"))
    sizes = set(hosts.values())
    return sizes.pop() if len(sizes) == 1 else world.size


def find_groups(
    strategy: ShardingStrategy | None,
    process_group: Any,  # noqa: ANN401 - c10d's types stay in comm
    mesh: DeviceMesh | None,
    *,
    has_policy: bool,
) -> Groups:
    """Return the groups for the constructor's arguments; may make the automatic ones."""
    chosen = own_member(ShardingStrategy, strategy or ShardingStrategy.FULL_SHARD)
    if process_group is not None and mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Pass one of them"
        )
    if row_of(chosen).is_hybrid:
        groups = _hybrid(chosen, process_group, mesh, has_policy=has_policy)
    else:
        groups = _plain(chosen, process_group, mesh)
    return _without_needless_sharding(groups)


def _plain(strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None) -> Groups:  # noqa: ANN401
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"Expected device_mesh to have ndim=1 but got {mesh.ndim} for {strategy}. Select "
                'one axis of it, for example mesh["shard"], or choose a hybrid strategy'
            )
        process_group = mesh.get_group()
    if isinstance(process_group, tuple):
        raise ValueError(
            f"Expected one process group for {strategy} but got a tuple of {len(process_group)}. "
            "A pair (shard, replicate) belongs to a hybrid strategy"
        )
    return Groups(strategy=strategy, shard=communicator(process_group, SHARD), mesh=mesh)


def _hybrid(
    strategy: ShardingStrategy,
    process_group: Any,  # noqa: ANN401 - c10d's types stay in comm
    mesh: DeviceMesh | None,
    *,
    has_policy: bool,
) -> Groups:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 but got {mesh.ndim}: dim 0 replicates and "
                "dim 1 shards"
            )
        pair = (mesh.get_group(1), mesh.get_group(0))
    elif process_group is None and not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or "
            "device_mesh. Pass process_group=(shard, replicate) or a 2-D device_mesh"
        )
    elif process_group is None:
        world = communicator()
        pair = hybrid_process_groups(world.group, devices_per_node(world))
    elif isinstance(process_group, tuple) and len(process_group) == 2:
        pair = process_group
    else:
        raise ValueError(
            "Expected process_group to be passed in as either None or "
            "Tuple[dist.ProcessGroup, dist.ProcessGroup] but got "
            f"{type(process_group).__name__}. A hybrid strategy takes (shard, replicate)"
        )
    shard, replicate = pair
    return Groups(
        strategy=strategy,
        shard=communicator(shard, SHARD),
        replicate=communicator(replicate, REPLICATE),
        mesh=mesh,
    )


def _without_needless_sharding(groups: Groups) -> Groups:
    """Choose ``NO_SHARD`` where one rank holds all; warns about that, and its deprecation."""
    strategy = groups.strategy
    size = groups.shard.size * (1 if groups.replicate is None else groups.replicate.size)
    if size == 1 and groups.shard.is_alone and strategy is not ShardingStrategy.NO_SHARD:
        warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
        )
        return Groups(strategy=ShardingStrategy.NO_SHARD, shard=groups.shard, mesh=groups.mesh)
    if size > 1 and strategy is ShardingStrategy.NO_SHARD:
        warn(
            "The `NO_SHARD` sharding strategy is deprecated. Use "
            "meshwright.data_parallel.replicate or DistributedDataParallel instead",
            FutureWarning,
        )
    return groups
