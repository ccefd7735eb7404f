"""A save that fails says why in one line, on every rank, and leaves earlier checkpoints alone."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import JSON, Storage, latest, load_tensors, save_tensors
from meshwright.errors import CheckpointWriteError
from support.checkpoint.faulty_storage import CountingStorage, FailingStorage, ThreadRank, on_ranks
from support.checkpoint.samples import METADATA, assert_equal, flat_shard, small


def with_old(folder: Path) -> Path:
    save_tensors(folder, small(100), METADATA, step=100)
    return folder


def failure(folder: Path, storage: Storage | None = None) -> str:
    """The one line of a save that fails, with the old checkpoint intact and nothing beside it."""
    with pytest.raises(CheckpointWriteError) as caught:
        save_tensors(folder, small(200), METADATA, step=200, storage=storage)
    message = str(caught.value)
    assert "\n" not in message
    assert f"checkpoint {folder / 'step_00000200'} was not saved" in message
    assert "earlier checkpoints are untouched; " in message
    return message


def assert_old_intact(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["step_00000100"]
    path = latest(folder)
    assert path is not None
    assert_equal(load_tensors(path).tensors, small(100))


@pytest.mark.few(1)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOSPC])
def test_every_operation_may_fail(tmp_path: Path, code: int) -> None:
    counting = CountingStorage()
    save_tensors(with_old(tmp_path / "counted"), small(200), METADATA, step=200, storage=counting)
    seen: set[str] = set()
    for number in range(counting.operations - 1):
        folder = with_old(tmp_path / str(number))
        storage = FailingStorage(at=number, code=code)
        message = failure(folder, storage)
        assert os.strerror(code) in message
        assert_old_intact(folder)
        seen.add(storage.failed_in)
    assert seen == {"mkdir", "create", "write", "sync", "sync_directory", "rename"}


def test_a_failure_after_the_rename_is_told_as_such(tmp_path: Path) -> None:
    counting = CountingStorage()
    save_tensors(with_old(tmp_path / "counted"), small(200), METADATA, step=200, storage=counting)
    folder = with_old(tmp_path / "run")
    message = failure(folder, FailingStorage(at=counting.operations - 1))
    assert "complete, but its name may not survive a loss of power" in message
    assert_equal(load_tensors(folder / "step_00000200").tensors, small(200))


def test_disk_full_at_any_byte(tmp_path: Path) -> None:
    counting = CountingStorage()
    save_tensors(with_old(tmp_path / "counted"), small(200), METADATA, step=200, storage=counting)
    folder = with_old(tmp_path / "run")
    for quota in range(0, counting.written, 97):
        message = failure(folder, FailingStorage(quota=quota))
        assert "No space left on device" in message
        assert "free some space" in message
        assert_old_intact(folder)


def test_too_little_space_is_seen_before_writing(tmp_path: Path) -> None:
    class Small(CountingStorage):
        def free_bytes(self, path: Path) -> int:
            return 5000

    folder = with_old(tmp_path)
    storage = Small()
    message = failure(folder, storage)
    assert f"(prepare): {folder}: needs 12.3 KB, 5.0 KB free" in message
    assert storage.written == 0
    assert_old_intact(folder)


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    folder = with_old(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        message = failure(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "rank_00000.safetensors: File too large" in message
    assert_old_intact(folder)


@contextmanager
def _no_more_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    handle = os.open("/", os.O_RDONLY)
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (handle, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files(tmp_path: Path) -> None:
    class LateLimit(Storage):
        """The limit is reached once the torso is there: it must go without any descriptor."""

        def create(self, path: Path) -> int:
            with _no_more_files():
                return super().create(path)

        def remove_file(self, path: Path) -> None:
            with _no_more_files():
                super().remove_file(path)

    folder = with_old(tmp_path)
    message = failure(folder, LateLimit())
    assert "Too many open files" in message
    assert "ulimit -n" in message
    assert_old_intact(folder)


def test_a_file_in_the_place_of_the_folder_or_of_a_parent(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"{file}: a file, where a folder is needed" in failure(file)
    assert f"{file}: a file, where a folder is needed" in failure(file / "below")
    assert file.read_text() == "mine"


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    class Vanishing(Storage):
        def create(self, path: Path) -> int:
            shutil.rmtree(path.parent.parent)
            return super().create(path)

    folder = with_old(tmp_path / "run")
    assert "No such file or directory" in failure(folder, Vanishing())
    assert not folder.exists()


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save_tensors(tmp_path, small(1), METADATA, step=200)
    message = failure(tmp_path)
    assert "a checkpoint of this step exists and is never overwritten" in message
    assert_equal(load_tensors(tmp_path / "step_00000200").tensors, small(1))


def test_a_checkpoint_that_appears_during_the_save_is_not_overwritten(tmp_path: Path) -> None:
    class Slow(Storage):
        def create(self, path: Path) -> int:
            if path.name == "manifest.json":
                save_tensors(tmp_path / "other", small(1), METADATA, step=200)
                (tmp_path / "other" / "step_00000200").rename(tmp_path / "step_00000200")
            return super().create(path)

    assert "appeared during the save" in failure(tmp_path, Slow())
    assert_equal(load_tensors(tmp_path / "step_00000200").tensors, small(1))


# ------------------------------------------------------------------ several ranks


def failures(folder: Path, save_on: Callable[[ThreadRank], Path]) -> list[str]:
    """The message of each of three ranks, all of which must refuse in the same words."""
    results = on_ranks(3, save_on)
    assert all(isinstance(result, CheckpointWriteError) for result in results), results
    return [str(result) for result in results]


def sharded(
    folder: Path,
    group: ThreadRank,
    storage: Storage | None = None,
    metadata: dict[str, JSON] | None = None,
    step: int = 200,
) -> Path:
    tensors = {name: flat_shard(t, group.rank, 3) for name, t in small(200).items()}
    return save_tensors(
        folder,
        tensors,
        METADATA if metadata is None else metadata,
        step=step,
        communicator=group,
        storage=storage,
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("quota", [0, 100, 900])
def test_one_rank_fails_and_all_say_which(tmp_path: Path, rank: int, quota: int) -> None:
    folder = with_old(tmp_path)

    def body(group: ThreadRank) -> Path:
        storage = FailingStorage(quota=quota) if group.rank == rank else Storage()
        return sharded(folder, group, storage)

    messages = failures(folder, body)
    assert len(set(messages)) == 1
    assert f"rank {rank}: " in messages[0]
    assert f"rank_{rank:05d}.safetensors: No space left on device" in messages[0]
    assert_old_intact(folder)


def test_a_rank_with_wrong_arguments_fails_all(tmp_path: Path) -> None:
    folder = with_old(tmp_path)

    def body(group: ThreadRank) -> Path:
        metadata: dict[str, JSON] = {"x": float("nan")} if group.rank == 1 else {}
        return sharded(folder, group, metadata=metadata)

    messages = failures(folder, body)
    assert "rank 1: metadata.x: nan is not a JSON number" in messages[0]
    assert_old_intact(folder)


def test_ranks_that_disagree(tmp_path: Path) -> None:
    folder = with_old(tmp_path)
    messages = failures(folder, lambda group: sharded(folder, group, metadata={"rank": group.rank}))
    assert "rank 0, 1, 2: metadata is " in messages[2]
    messages = failures(folder, lambda group: sharded(folder, group, step=200 + group.rank // 2))
    assert "step is 200 on ranks [0, 1]; 201 on ranks [2]" in messages[0]

    def shapes(group: ThreadRank) -> Path:
        tensors = {"t": torch.zeros(2 + group.rank // 2)}
        return save_tensors(folder, tensors, {}, step=200, communicator=group)

    messages = failures(folder, shapes)
    assert "'t' is float32 (2,) on rank 0 and float32 (3,) on rank 2" in messages[1]
    assert_old_intact(folder)


def test_a_shard_that_no_rank_passes(tmp_path: Path) -> None:
    folder = with_old(tmp_path)

    def body(group: ThreadRank) -> Path:
        tensors = {"t": flat_shard(torch.zeros(9), group.rank, 3)} if group.rank != 1 else {}
        return save_tensors(folder, tensors, {}, step=200, communicator=group)

    assert "'t': the pieces leave a gap: they hold 6 of 9" in failures(folder, body)[0]
    assert_old_intact(folder)


def test_a_folder_that_one_rank_does_not_share(tmp_path: Path) -> None:
    folder = with_old(tmp_path / "run")

    def body(group: ThreadRank) -> Path:
        return sharded(folder if group.rank != 2 else tmp_path / "local", group)

    messages = failures(folder, body)
    assert "rank 2: " in messages[0]
    assert "No such file or directory" in messages[0]
    assert "a folder that they share" in messages[0]
    assert_old_intact(folder)


def test_the_exchanges_of_a_save_are_labeled(tmp_path: Path) -> None:
    def body(group: ThreadRank) -> list[str]:
        sharded(tmp_path, group)
        return group.labels

    phases = ("describe", "prepare", "write", "commit")
    expected = [f"checkpoint step 200: {phase}" for phase in phases]
    assert on_ranks(3, body) == [expected] * 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), ": MemoryError; earlier checkpoints are untouched; free memory"),
        (
            RuntimeError("no"),
            ": RuntimeError: no; earlier checkpoints are untouched; the traceback",
        ),
        (TypeError("no"), ": no; earlier checkpoints are untouched; correct the arguments"),
    ],
)
def test_what_to_do_fits_what_has_failed(tmp_path: Path, error: Exception, said: str) -> None:
    class Failing(Storage):
        def write(self, handle: int, data: bytes | memoryview) -> None:
            raise error

    def save_on(group: ThreadRank) -> Path:
        return save_tensors(
            tmp_path, small(1), METADATA, step=1, storage=Failing(), communicator=group
        )

    for message in failures(tmp_path, save_on):
        assert said in message
