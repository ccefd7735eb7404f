"""The groups and meshes that a rank has for a plan: all axes, in any order of ranks."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.comm import Communicator, communicator
from meshwright.composition import parallelize
from meshwright.mesh import DeviceMesh
from meshwright.plan import Plan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.composition import LayoutCommunicators

GROUPS = {
    "data": {"replicate", "shard", "expert"},
    "sums": {"replicate", "shard", "expert", "context"},
    "losses": {"replicate", "shard", "expert", "context", "pipeline"},
    "alike": {"pipeline", "context", "tensor"},
    "passes": {"pipeline", "context", "tensor", "expert"},
    "pipeline": {"pipeline"},
    "tensor": {"tensor"},
    "context": {"context"},
    "expert": {"expert"},
}
"""By attribute, the axes along which its ranks differ."""


def along(axes: Axes, rank: int, names: set[str]) -> list[int]:
    here = axes.coordinate(rank)
    return [
        other
        for other in range(axes.world_size)
        if all(here[n] == i for n, i in axes.coordinate(other).items() if n not in names)
    ]


def check_mesh(mesh: DeviceMesh, axes: Axes, rank: int) -> None:
    """Each dim has the ranks along the axes of its name, in the order of their coordinates."""
    assert rank in mesh.mesh.flatten().tolist()
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        names = name.split("_")
        expected = along(axes, rank, set(names))
        expected.sort(key=lambda other: [axes.coordinate(other)[n] for n in names])
        assert dist.get_process_group_ranks(mesh.get_group(number)) == sorted(expected)
        assert mesh.get_local_rank(number) == expected.index(rank)


def body(sizes: dict[str, int]) -> None:
    axes = Axes.of(sizes)
    several = {name for name, size in sizes.items() if size > 1}
    for rank in {0, 1, axes.world_size // 2, axes.world_size - 1}:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=axes.world_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process is behind the group
            peers = LayoutCommunicators.of(Plan(axes=axes), communicator())
        for name, over in GROUPS.items():
            found: Communicator | None = getattr(peers, name)
            if name in ("context", "expert") and name not in several:
                assert found is None
                continue
            assert found is not None
            assert list(found.ranks) == along(axes, rank, over), name
        placed = several - {"pipeline"}
        assert (peers.mesh is None) is (placed <= {"replicate"})
        if peers.mesh is not None:
            assert peers.dense is not None
            assert set(peers.mesh.mesh_dim_names or ()) == placed
            check_mesh(peers.mesh, axes, rank)
            check_mesh(peers.dense, axes, rank)
            assert peers.mesh.mesh.flatten().tolist() == peers.dense.mesh.flatten().tolist()
        if "shard" in several:
            joined = [n for n in sizes if n in several & {"shard", "context", "expert"}]
            assert peers.sharding is not None
            wanted = (*(["replicate"] if "replicate" in several else []), "_".join(joined))
            assert peers.sharding.mesh_dim_names == wanted
        else:
            assert peers.dense is peers.mesh
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "sizes",
    [
        {"replicate": 4},
        {"pipeline": 2, "replicate": 2, "shard": 3, "tensor": 2},
        {"replicate": 2, "expert": 4},
        {"pipeline": 2, "replicate": 2, "shard": 2, "context": 2, "expert": 2, "tensor": 2},
        {"expert": 2, "tensor": 2, "context": 2, "shard": 3, "replicate": 1},
    ],
)
def test_every_rank_has_its_groups_and_meshes(ranks: Ranks, sizes: dict[str, int]) -> None:
    ranks(1, body, sizes, connected=False)


def test_shards_take_the_ranks_that_are_left(ranks: Ranks) -> None:
    def run() -> None:
        plan = Plan.from_toml("[axes]\ndp_replicate = 2\ndp_shard = -1")
        laid = parallelize(nn.Linear(4, 4), plan, optimizer=None, loss=nn.functional.mse_loss)
        assert laid.plan.axes.mapping() == {"replicate": 2, "shard": 2}

    ranks(4, run)
