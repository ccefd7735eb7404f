"""A save that ends anywhere leaves the old checkpoint or the new one, never a mix of both."""

from __future__ import annotations

import copy
import logging
import os
import random
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import Storage, latest, load_tensors, save_tensors
from meshwright.errors import CheckpointDamagedError
from support.checkpoint.crash_states import RecordedStorage, crash, read_tree
from support.checkpoint.faulty_storage import (
    CountingStorage,
    Killed,
    KilledStorage,
    ThreadRank,
    on_ranks,
)
from support.checkpoint.samples import METADATA, assert_equal, flat_shard, save_sharded, small

OLD, NEW = 100, 200


def save_new(folder: Path, storage: Storage, keep_last: int | None = None) -> Path:
    return save_tensors(
        folder, small(NEW), METADATA, step=NEW, storage=storage, keep_last=keep_last
    )


def with_old(folder: Path) -> Path:
    save_tensors(folder, small(OLD), METADATA, step=OLD)
    return folder


def loaded_step(folder: Path) -> int:
    """The step that a resumed run would start from, after comparing every tensor with it."""
    path = latest(folder)
    assert path is not None
    for complete in folder.glob("step_*"):
        load_tensors(complete)  # the name alone says that nothing is missing
    found = load_tensors(path)
    assert path.name == f"step_{found.step:08d}"
    assert_equal(found.tensors, small(found.step))
    return found.step


def torsos(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def totals(tmp_path: Path) -> tuple[int, int]:
    """Operations and bytes of one save."""
    counting = CountingStorage()
    save_new(with_old(tmp_path / "counted"), counting, keep_last=1)
    return counting.operations, counting.written


def test_kill_before_every_operation(tmp_path: Path) -> None:
    operations, _ = totals(tmp_path)
    steps: list[int] = []
    for number in range(operations):
        folder = with_old(tmp_path / str(number))
        with pytest.raises(Killed):
            save_new(folder, KilledStorage(at_operation=number), keep_last=1)
        steps.append(loaded_step(folder))
        save_tensors(folder, small(300), METADATA, step=300)
        assert torsos(folder) == []
        assert loaded_step(folder) == 300
    assert steps == sorted(steps)
    assert {OLD, NEW} == set(steps)


@pytest.mark.slow
def test_kill_at_200_random_bytes(tmp_path: Path) -> None:
    _, written = totals(tmp_path)
    choose = random.Random(2)
    folder = with_old(tmp_path / "run")
    for _ in range(200):
        with pytest.raises(Killed):
            save_new(folder, KilledStorage(at_byte=choose.randrange(written)))
        assert loaded_step(folder) == OLD
        assert len(torsos(folder)) == 1


def _kill_in_child(folder: Path, storage: KilledStorage) -> int:
    """The signal that ended a forked process which was saving."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            save_new(folder, storage, keep_last=1)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def test_kill_9_of_a_process_that_saves(tmp_path: Path) -> None:
    operations, written = totals(tmp_path)
    choose = random.Random(3)
    storages = [
        *(KilledStorage(at_byte=choose.randrange(written), really=True) for _ in range(10)),
        *(KilledStorage(at_operation=number, really=True) for number in range(0, operations, 2)),
    ]
    steps: set[int] = set()
    for number, storage in enumerate(storages):
        folder = with_old(tmp_path / str(number))
        assert _kill_in_child(folder, storage) == 9
        steps.add(loaded_step(folder))
    assert steps == {OLD, NEW}


def test_the_torso_is_named_passed_over_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_old(tmp_path)
    with pytest.raises(Killed):
        save_new(folder, KilledStorage(at_byte=1000))
    (torso,) = torsos(folder)
    with caplog.at_level(logging.WARNING):
        assert loaded_step(folder) == OLD
        assert f"ignoring {folder / torso}: left by an interrupted save" in caplog.text
        save_new(folder, Storage())
        assert f"removing {folder / torso}" in caplog.text
    assert torsos(folder) == []
    assert loaded_step(folder) == NEW


@pytest.mark.few(1)
@pytest.mark.parametrize("killed_rank", [0, 1, 2])
def test_one_rank_is_killed(tmp_path: Path, killed_rank: int) -> None:
    for number in range(6):
        folder = tmp_path / f"run{number}"
        save_sharded(folder, small(OLD), step=OLD)

        def body(group: ThreadRank, number: int = number, folder: Path = folder) -> Path:
            rank = group.rank
            dying = KilledStorage(at_operation=number) if rank == killed_rank else Storage()
            return save_tensors(
                folder,
                {name: flat_shard(tensor, rank, 3) for name, tensor in small(NEW).items()},
                METADATA,
                step=NEW,
                communicator=group,
                storage=dying,
            )

        results = on_ranks(3, body)
        if not all(isinstance(result, Path) for result in results):
            assert not any(isinstance(result, Path) for result in results)
            assert loaded_step(folder) in (OLD, NEW)
        save_sharded(folder, small(300), step=300)
        assert torsos(folder) == []
        assert loaded_step(folder) == 300


def crash_states(
    tmp_path: Path, storage: RecordedStorage, draws: int, seed: int, *, only_at_end: bool = False
) -> list[int]:
    """The step loaded from random legal states after each operation of a save."""
    folder = with_old(tmp_path / "run")
    before = read_tree(folder)
    save_new(folder, storage, keep_last=1)
    choose = random.Random(seed)
    steps: list[int] = []
    end = len(storage.record)
    for count in range(end if only_at_end else 0, end + 1):
        for _ in range(draws):
            state = tmp_path / "state"
            crash(copy.deepcopy(before), folder, storage.record[:count], state, choose)
            steps.append(loaded_step(state))
            shutil.rmtree(state)
    return steps


def test_every_order_of_unsynced_writes_leaves_old_or_new(tmp_path: Path) -> None:
    steps = crash_states(tmp_path, RecordedStorage(), draws=8, seed=4)
    assert set(steps) == {OLD, NEW}
    assert steps[0] == OLD
    assert steps[-8:] == [NEW] * 8


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("seed", range(3))
def test_many_orders_of_unsynced_writes(tmp_path: Path, seed: int) -> None:
    steps = crash_states(tmp_path, RecordedStorage(), draws=150, seed=seed)
    assert set(steps) == {OLD, NEW}


@pytest.mark.parametrize("forgotten", ["sync", "sync_directory"])
def test_the_simulation_sees_a_forgotten_sync(tmp_path: Path, forgotten: str) -> None:
    """The guard of the guards: without one kind of sync, some legal state is a mix or a loss."""
    with pytest.raises((CheckpointDamagedError, AssertionError)):
        crash_states(
            tmp_path, RecordedStorage(dropped=(forgotten,)), draws=60, seed=5, only_at_end=True
        )


def test_tensors_that_change_during_a_save_are_refused_when_loaded(tmp_path: Path) -> None:
    tensor = torch.zeros(100_000)  # of small ones a copy is summed, and written

    class Meddling(Storage):
        def write(self, handle: int, data: bytes | memoryview) -> None:
            tensor.add_(1)
            super().write(handle, data)

    path = save_tensors(tmp_path, {"t": tensor}, {}, step=0, storage=Meddling())
    with pytest.raises(CheckpointDamagedError, match="tensor 't'"):
        load_tensors(path)
