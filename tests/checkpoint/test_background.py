"""Saves in the background: the bits of one moment, complete or not at all, errors on all ranks."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import checkpoint
from meshwright.checkpoint import Storage, latest, load_tensors, step_directory
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import CheckpointClaimedError, CheckpointWriteError
from meshwright.plan import Plan
from meshwright.testing import Ranks, RanksFailed
from meshwright.testing.simulated import SimulatedDevice, SimulationError, simulated
from support.checkpoint.faulty_storage import (
    CountingStorage,
    FailingStorage,
    KilledStorage,
    ThreadRank,
    on_ranks,
)
from support.checkpoint.samples import METADATA, assert_equal, flat_shard, small
from support.internals.axes import Axes
from support.internals.checkpoint import Alone, PendingSave, SaveRequest, Staging, begin, staging


class HeldStorage(Storage):
    """Writes nothing before ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def create(self, path: Path) -> int:
        assert self.go.wait(60)
        return super().create(path)


def begin_one(
    folder: Path, seed: int, storage: Storage | None = None, tensors: object = None
) -> PendingSave:
    """Begin a save of this process alone."""
    return begin(request(folder, seed, storage, tensors))


def request(
    folder: Path,
    seed: int,
    storage: Storage | None = None,
    tensors: object = None,
    group: object = None,
) -> SaveRequest:
    target = step_directory(folder, seed)
    return SaveRequest(
        target=target,
        torso=target.with_name(f".{target.name}.tmp-01234567"),
        tensors=small(seed) if tensors is None else tensors,
        metadata=METADATA,
        step=seed,
        alike=(),
        keep_last=None,
        group=Alone() if group is None else group,
        storage=Storage() if storage is None else storage,
    )


def loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[:2](torch.rand(4, 8)).double().square().sum().backward()
    model[2](torch.rand(4, 8).double()).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that changes in training, by name."""
    found = {f"model/{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"optimizer/{number}/{key}": value for key, value in state.items()}
    return found


# ------------------------------------------------------------------ one process


def test_the_checkpoint_has_the_bits_of_the_moment_of_the_save(tmp_path: Path) -> None:
    model, optimizer = loop()
    path = checkpoint.save(tmp_path / "before", 1, model=model, optimizer=optimizer, random=False)
    storage = HeldStorage()
    with injected(storage):
        pending = checkpoint.save(
            tmp_path, 1, model=model, optimizer=optimizer, random=False, background=True
        )
        assert not pending.done() and latest(tmp_path) is None
        with torch.no_grad():
            for tensor in tensors_of(model, optimizer).values():
                tensor.fill_(7)
        storage.go.set()
        assert pending.wait() == tmp_path / "step_00000001" == pending.path == latest(tmp_path)
    assert pending.done()
    found = load_tensors(pending.path).tensors
    assert len(found) == len(tensors_of(model, optimizer))
    assert_equal(found, load_tensors(path).tensors)


@contextmanager
def injected(storage: Storage) -> Iterator[None]:
    """Have each save that is begun in the block use ``storage``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.checkpoint.training.loops.Storage", lambda: storage)
        yield


def test_the_next_save_and_finish_wait_for_the_one_under_way(tmp_path: Path) -> None:
    assert checkpoint.finish() is None
    storage = HeldStorage()
    with injected(storage):
        first = checkpoint.save(tmp_path, 1, extra=1, background=True)
        threading.Timer(0.2, storage.go.set).start()
        second = checkpoint.save(tmp_path, 2, extra=2, background=True, keep_last=1)
        assert first.done() and latest(tmp_path) is not None
    assert checkpoint.finish() == second.path
    assert checkpoint.finish() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    assert checkpoint.load(tmp_path).extra == 2


def test_a_torso_of_this_process_is_no_leftover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = HeldStorage()
    pending = begin_one(tmp_path, 1, storage)
    assert latest(tmp_path) is None
    assert "interrupted" not in caplog.text
    with pytest.raises(CheckpointClaimedError, match="by another thread .*finish"):
        checkpoint.save_tensors(tmp_path, small(2), {}, step=2)
    storage.go.set()
    pending.wait()
    checkpoint.save_tensors(tmp_path, small(2), {}, step=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC])
def test_every_operation_of_the_thread_may_fail(tmp_path: Path, code: int) -> None:
    counting = CountingStorage()
    checkpoint.save_tensors(tmp_path / "counted", small(0), METADATA, step=0)
    begin_one(tmp_path / "counted", 1, counting).wait()
    seen: set[str] = set()
    for number in range(counting.operations - 1):
        folder = tmp_path / str(number)
        checkpoint.save_tensors(folder, small(0), METADATA, step=0)
        storage = FailingStorage(at=number, code=code)
        with pytest.raises(CheckpointWriteError) as caught:
            begin_one(folder, 1, storage).wait()
        message = str(caught.value)
        assert os.strerror(code) in message and "\n" not in message
        assert f"checkpoint {folder / 'step_00000001'} was not saved" in message
        assert [path.name for path in folder.iterdir()] == ["step_00000000"]
        seen.add(storage.failed_in)
    assert {"create", "write", "sync", "sync_directory", "rename"} <= seen


@pytest.mark.parametrize("place", ["wait", "save", "finish", "look"])
def test_an_error_is_raised_once_where_the_ranks_meet_next(tmp_path: Path, place: str) -> None:
    pending = begin_one(tmp_path, 1, FailingStorage(quota=300))
    while not pending.done():
        time.sleep(0.01)

    def look() -> None:
        pending.look()  # sends how far this rank is
        pending.look()

    calls: dict[str, Callable[[], object]] = {
        "wait": pending.wait,
        "save": lambda: checkpoint.save(tmp_path, 2, extra=2),
        "finish": checkpoint.finish,
        "look": look,
    }
    with pytest.raises(CheckpointWriteError, match="No space left on device.*free some space"):
        calls[place]()
    assert checkpoint.finish() is None
    checkpoint.save(tmp_path, 2, extra=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    with pytest.raises(CheckpointWriteError, match="step_00000001 was not saved"):
        pending.wait()


def test_a_disk_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"\(prepare\).*Read-only file system"):
        begin_one(tmp_path, 1, FailingStorage(at=0, code=errno.EROFS))
    assert checkpoint.finish() is None


def test_staging_memory_is_kept_from_save_to_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {f"t{n}": torch.full((1000 + n,), float(n)) for n in range(20)}
    with caplog.at_level(logging.INFO):
        first = begin_one(tmp_path, 1, tensors=tensors)
        first.wait()
        blocks = [block.data_ptr() for block in staging().blocks]
        for step in range(2, 5):
            begin_one(tmp_path, step, tensors=tensors).wait()
    assert [block.data_ptr() for block in staging().blocks] == blocks
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size <= first.staged <= 1.1 * size
    assert caplog.text.count("saves in the background keep") <= 1


def test_what_does_not_fit_is_saved_in_the_foreground_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.cache_clear()
    monkeypatch.setattr(
        "meshwright.checkpoint.background.memory_limit", lambda: (1000, "free on the machine")
    )
    for step in (1, 2):
        pending = begin_one(tmp_path, step)
        assert pending.done() and pending.staged == 0 and pending.wait().is_dir()
        assert checkpoint.finish() is None
        assert_equal(load_tensors(pending.path).tensors, small(step))
    assert caplog.text.count("saved in the foreground, as a copy does not fit: rank 0 needs") == 1


PROGRAM = """
import sys, time
from pathlib import Path
from meshwright import checkpoint
from meshwright.checkpoint import Storage

class Slow(Storage):
    def create(self, path):
        time.sleep(0.5)
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device", str(path))
        return super().create(path)

checkpoint.training.loops.Storage = Slow
checkpoint.save(sys.argv[1], 1, extra=1, background=True)
if sys.argv[2] == "raises":
    raise SystemError("on purpose")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("fails", 1), ("raises", 1)])
def test_a_process_that_ends_waits_for_the_save(tmp_path: Path, how: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    if how == "fails":
        assert latest(tmp_path) is None and list(tmp_path.iterdir()) == []
        assert "rank_00000.safetensors: No space left on device" in done.stderr
    else:
        assert checkpoint.load(tmp_path).extra == 1


# ------------------------------------------------------------------ several ranks


def sharded(
    folder: Path, group: ThreadRank, storage: Storage | None = None, seed: int = 200
) -> SaveRequest:
    tensors = {name: flat_shard(t, group.rank, group.size) for name, t in small(seed).items()}
    return request(folder, seed, storage, tensors, group)


@pytest.fixture
def staging_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads have the memory of one process each."""
    here = threading.local()

    def own() -> object:
        here.staging = getattr(here, "staging", None) or Staging()
        return here.staging

    monkeypatch.setattr("meshwright.checkpoint.background.staging", own)


@pytest.mark.usefixtures("staging_of_each_thread")
def test_ranks_write_in_the_background_what_they_write_in_the_foreground(tmp_path: Path) -> None:
    def body(group: ThreadRank) -> Path:
        return begin(sharded(tmp_path, group)).wait()

    assert on_ranks(3, body) == [tmp_path / "step_00000200"] * 3
    assert_equal(load_tensors(tmp_path / "step_00000200").tensors, small(200))
    names = sorted(path.name for path in (tmp_path / "step_00000200").iterdir())
    assert names == ["manifest.json", *(f"rank_{rank:05d}.safetensors" for rank in range(3))]


@pytest.mark.usefixtures("staging_of_each_thread")
@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("quota", [0, 900])
def test_one_rank_fails_and_all_say_which(tmp_path: Path, rank: int, quota: int) -> None:
    def body(group: ThreadRank) -> Path:
        storage = FailingStorage(quota=quota) if group.rank == rank else Storage()
        return begin(sharded(tmp_path, group, storage)).wait()

    results = on_ranks(3, body)
    assert all(isinstance(result, CheckpointWriteError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert f"(write): rank {rank}: " in str(results[0])
    assert f"rank_{rank:05d}.safetensors: No space left on device" in str(results[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("staging_of_each_thread")
def test_the_ranks_exchange_how_far_they_are_and_do_not_wait(tmp_path: Path) -> None:
    storage = HeldStorage()

    def body(group: ThreadRank) -> list[str]:
        pending = begin(sharded(tmp_path, group, storage if group.rank == 1 else None))
        del group.labels[:]
        for _ in range(3):
            pending.look()
        assert not pending.done()
        storage.go.set()
        while not pending.done():
            time.sleep(0.01)
        for _ in range(3):
            if not pending._is_over:
                pending.look()
        assert pending._is_over
        return group.labels

    (labels, *others) = on_ranks(3, body)
    assert isinstance(labels, list) and others == [labels] * 2, others
    state = "checkpoint step 200: state"
    assert labels[:2] == [state] * 2 and labels[-2:] == [
        f"checkpoint step 200: {phase}" for phase in ("write", "commit")
    ]


# ------------------------------------------------------------------ real ranks


def trainable(axis: str = "replicate") -> object:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    return parallelize(
        model,
        Plan(axes=Axes.of({axis: communicator().size})),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        loss=lambda output: output.square().mean(),
        example=torch.ones(2, 8, dtype=torch.float64),
    )


def body_steps(folder: Path, axis: str) -> None:
    """Train on while each checkpoint is written; each loads as the weights of its moment."""
    made, weights = trainable(axis), {}
    for step in range(1, 5):
        made.step(torch.full((2, 8), float(step), dtype=torch.float64))
        weights[step] = {name: value.clone() for name, value in made.weights().items()}
        assert checkpoint.save(folder, step, model=made, background=True).staged
    made.step(torch.ones(2, 8, dtype=torch.float64))
    checkpoint.finish()
    for step, expected in weights.items():
        checkpoint.load(folder, step=step, model=made)
        assert_equal(made.weights(), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_training_goes_on_while_ranks_save(ranks: Ranks, tmp_path: Path, axis: str) -> None:
    ranks(2, body_steps, tmp_path, axis)


@pytest.mark.devices("simulated")
def test_training_goes_on_on_devices(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_steps, tmp_path, "shard")


def body_fails_in_step(folder: Path) -> None:
    made, batch = trainable(), torch.ones(2, 8, dtype=torch.float64)
    made.step(batch)
    storage = FailingStorage(quota=300) if communicator().rank == 1 else Storage()
    with injected(storage):
        checkpoint.save(folder, 1, model=made, background=True)
    taken = [made.steps]

    def train() -> None:
        for _ in range(1000):
            made.step(batch)
            taken.append(made.steps)
            time.sleep(0.01)

    with pytest.raises(CheckpointWriteError, match=r"rank 1: .*rank_00001.*No space left"):
        train()
    made.step(batch)
    assert made.steps == taken[-1] + 1, "the step that raised had not begun"
    if communicator().rank == 0:
        assert [path.name for path in folder.iterdir()] == [".claim"]


def test_a_step_raises_on_all_ranks_what_one_could_not_write(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_fails_in_step, tmp_path)


def body_leaves(folder: Path) -> None:
    storage = HeldStorage()
    threading.Timer(0.5, storage.go.set).start()
    with injected(storage if communicator().rank == 1 else Storage()):
        checkpoint.save(folder, 1, extra=1, background=True)


def test_ranks_that_end_wait_for_the_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_leaves, tmp_path)
    assert latest(tmp_path) == tmp_path / "step_00000001"


def body_killed(folder: Path, rank: int, at: int) -> None:
    dying = communicator().rank == rank
    with injected(KilledStorage(at_byte=at, really=True) if dying else Storage()):
        checkpoint.save(folder, 200, extra={"t": torch.rand(5000)}, background=True)
    checkpoint.finish()


@pytest.mark.few(1)
@pytest.mark.parametrize(("rank", "at"), [(0, 700), (1, 700), (0, 22_000)])
def test_kill_9_of_a_rank_that_writes(ranks: Ranks, tmp_path: Path, rank: int, at: int) -> None:
    checkpoint.save(tmp_path, 100, extra=100)
    with pytest.raises(RanksFailed, match=rf"rank {rank}.* killed by signal 9"):
        ranks(2, body_killed, tmp_path, rank, at)
    assert checkpoint.load(tmp_path).extra == 100


# ------------------------------------------------------------------ a device


class ReadingStorage(Storage):
    """Tells the device that this thread reads staging memory, before it writes."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.main = device, device.host

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self.device.host.wait_for(self.main)  # as this thread was started there
        self.device.launch("write", staging().blocks, line=self.device.host)
        super().write(handle, data)


@pytest.mark.parametrize("waits", [True, False])
def test_a_device_has_made_the_copies_before_they_are_written(tmp_path: Path, waits: bool) -> None:
    staging.cache_clear()

    def save() -> None:
        with simulated() as device:
            tensors = {"t": torch.arange(64.0).view(8, 8), "s": torch.ones(3)}
            storage = ReadingStorage(device)
            with pytest.MonkeyPatch.context() as patch:
                if not waits:
                    patch.setattr("meshwright.checkpoint.background.record", lambda _: Passed())
                pending = begin_one(tmp_path, 1, storage, tensors=tensors)
                waited = [stop for stop in device.stops if stop.what != "wait for an event"]
                assert waited == [], "the training does not wait for the copies"
                for tensor in tensors.values():
                    tensor.add_(1)
                pending.wait()

    if waits:
        save()
        found = load_tensors(tmp_path / "step_00000001").tensors
        assert_equal(found, {"t": torch.arange(64.0).view(8, 8), "s": torch.ones(3)})
    else:
        with pytest.raises(SimulationError, match="unordered"):
            save()
    staging.cache_clear()


class Passed:
    """An event that nobody waits for."""

    def synchronize(self) -> None:
        pass


# ------------------------------------------------------------------ many saves


@pytest.mark.slow
def test_the_memory_of_200_saves_stays_flat(tmp_path: Path) -> None:
    model, optimizer = loop()
    big = nn.Linear(500, 500)
    seen: list[int] = []
    for step in range(200):
        checkpoint.save(
            *(tmp_path, step),
            model=nn.ModuleList([model, big]),
            optimizer=optimizer,
            background=True,
            keep_last=2,
        )
        seen.append(resident())
    checkpoint.finish()
    assert max(seen[100:]) - max(seen[:100]) < 2 * 2**20, (seen[0], seen[99], seen[199])
    assert threading.active_count() < 10


def resident() -> int:
    """Bytes of memory of this process that are in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
