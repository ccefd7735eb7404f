"""Saving from real ranks through comm: one that fails and one that is killed among them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import Storage, latest, load_into, load_tensors, save_tensors
from meshwright.comm import communicator
from meshwright.errors import CheckpointWriteError, CommunicationError
from meshwright.testing import Ranks, RanksFailed
from support.checkpoint.faulty_storage import FailingStorage, KilledStorage
from support.checkpoint.samples import METADATA, assert_equal, flat_shard, small


def save_on_rank(folder: Path, seed: int, storage: Storage | None = None) -> Path:
    group = communicator()
    tensors = {
        name: flat_shard(tensor, group.rank, group.size) for name, tensor in small(seed).items()
    }
    return save_tensors(folder, tensors, METADATA, step=seed, communicator=group, storage=storage)


def body_save_and_load(folder: Path) -> None:
    group = communicator()
    path = save_on_rank(folder, 100)
    for name, tensor in small(100).items():
        expected = flat_shard(tensor, group.size - 1 - group.rank, group.size)
        found = flat_shard(torch.zeros_like(tensor), group.size - 1 - group.rank, group.size)
        load_into(path, {name: found}, within=name)
        assert torch.equal(found.tensor, expected.tensor)


def body_fail(folder: Path, rank: int) -> None:
    storage = FailingStorage(quota=300) if communicator().rank == rank else None
    with pytest.raises(CheckpointWriteError, match=rf"rank {rank}: .*No space left on device"):
        save_on_rank(folder, 200, storage)


def body_killed(folder: Path, rank: int, at: int) -> None:
    dying = communicator().rank == rank
    save_on_rank(folder, 200, KilledStorage(at_byte=at, really=True) if dying else None)


def assert_old(folder: Path) -> None:
    path = latest(folder)
    assert path is not None
    assert_equal(load_tensors(path).tensors, small(100))


def test_ranks_save_and_load_each_others_shards(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, body_save_and_load, tmp_path)
    assert_old(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_name_the_one_that_failed(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    save_tensors(tmp_path, small(100), METADATA, step=100)
    ranks(2, body_fail, tmp_path, rank)
    assert_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000100"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rank", "at"), [(0, 700), (1, 700), (0, 2500)])
def test_kill_9_of_a_rank_that_saves(ranks: Ranks, tmp_path: Path, rank: int, at: int) -> None:
    save_tensors(tmp_path, small(100), METADATA, step=100)
    with pytest.raises(RanksFailed, match=rf"rank {rank}.* killed by signal 9"):
        ranks(2, body_killed, tmp_path, rank, at)
    assert_old(tmp_path)
    ranks(2, save_on_rank, tmp_path, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100", "step_00000200"]


class SlowStorage(Storage):
    """Takes its time to bring data to the disk."""

    def sync(self, handle: int) -> None:
        time.sleep(4.0)
        super().sync(handle)


def body_slow(folder: Path) -> None:
    group = communicator()
    group.timeout = 1.0
    save_on_rank(folder, 200, SlowStorage() if group.rank == 1 else None)
    if group.rank == 0:
        # Outside of a save the same silence is an error.
        with pytest.raises(CommunicationError, match="rank 1"):
            group.barrier()
        return
    time.sleep(4.0)
    with contextlib.suppress(CommunicationError):  # rank 0 had come before it gave up
        group.barrier()


@pytest.mark.slow
def test_slow_storage_is_no_dead_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_slow, tmp_path)
    assert latest(tmp_path) == tmp_path / "step_00000200"
