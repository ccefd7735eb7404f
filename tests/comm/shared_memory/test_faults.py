"""Shared memory never hangs: lost, stopped and mismatched ranks are named, and nothing is left."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)
from meshwright.testing import Ending, Outcome, Ranks, RanksFailed
from support.comm.shared_memory import LARGE, error_of, join
from support.internals.comm import Segment

Operation = Callable[[int, dist.ProcessGroup | None], object]
"""Called with the rank that is lost, on a group of three."""


def refuses_everything() -> None:
    """The group raises, and does not hang, after an error."""
    start = time.monotonic()
    for operation in (
        lambda: dist.all_reduce(torch.ones(3)),
        dist.barrier,
        lambda: dist.send(torch.ones(LARGE), (dist.get_rank() + 1) % dist.get_world_size()),
    ):
        with pytest.raises(CommunicationError):
            operation()
    assert time.monotonic() - start < 1


OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda lost, group: dist.all_reduce(torch.ones(10), group=group),
    "all_reduce large": lambda lost, group: dist.all_reduce(torch.ones(LARGE), group=group),
    "all_gather": lambda lost, group: dist.all_gather(
        [torch.ones(5)] * 3, torch.ones(5), group=group
    ),
    "reduce_scatter": lambda lost, group: dist.reduce_scatter(
        torch.ones(5), [torch.ones(5)] * 3, group=group
    ),
    "broadcast": lambda lost, group: dist.broadcast(torch.ones(5), 2, group=group),
    "reduce": lambda lost, group: dist.reduce(torch.ones(5), 0, group=group),
    "gather": lambda lost, group: dist.gather(
        torch.ones(5), [torch.ones(5)] * 3 if dist.get_rank() == 0 else None, group=group
    ),
    "scatter": lambda lost, group: dist.scatter(
        torch.ones(5), [torch.ones(5)] * 3 if dist.get_rank() == 0 else None, group=group
    ),
    "barrier": lambda lost, group: dist.barrier(group=group),
    "all_to_all": lambda lost, group: dist.all_to_all_single(
        torch.ones(6), torch.ones(6), group=group
    ),
    "recv": lambda lost, group: dist.recv(torch.ones(5), lost, group=group),
    "recv any": lambda lost, group: dist.recv(torch.ones(5), group=group),
    "send large": lambda lost, group: dist.send(torch.ones(LARGE), lost, group=group),
    "asynchronous": lambda lost, group: _wait(
        dist.all_reduce(torch.ones(10), group=group, async_op=True)
    ),
    "object": lambda lost, group: dist.all_gather_object([None] * 3, lost, group=group),
}


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def outcomes_of(ranks: Ranks, body: Callable[[], object], victim: int) -> list[Outcome]:
    """How the ranks other than ``victim`` ended, all by returning."""
    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    others = [outcome for outcome in caught.value.outcomes if outcome.rank != victim]
    for outcome in others:
        assert outcome.ending == Ending.RETURNED, outcome
    return others


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "lost", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_killed_rank_is_named_within_a_second(
    ranks: Ranks, name: str, lost: int, tmp_path: Path
) -> None:
    note = tmp_path / "killed"

    def body() -> str:
        join()
        rank = dist.get_rank()
        dist.barrier()
        if rank == lost:
            time.sleep(0.1)
            note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        error = error_of(lambda: (OPERATIONS[name](lost, None), dist.barrier()), 5)
        assert time.monotonic() - float(note.read_text()) < 1
        assert isinstance(error, RankFailedError) and error.rank == lost
        refuses_everything()
        return str(error)

    for outcome in outcomes_of(ranks, body, victim=lost):
        assert f"rank {lost} (process " in str(outcome.value)


def test_a_rank_killed_amid_a_large_operation_is_named(ranks: Ranks) -> None:
    def body() -> str:
        join()
        if dist.get_rank() == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        tensor = torch.zeros(LARGE)
        error = error_of(lambda: [dist.all_reduce(tensor) for _ in range(1_000_000)], 5)
        assert isinstance(error, RankFailedError) and error.rank == 1
        return str(error)

    outcomes_of(ranks, body, victim=1)


def test_a_stopped_rank_is_named_at_the_limit(ranks: Ranks) -> None:
    def body() -> None:
        group = join(timeout=1.0)
        rank = dist.get_rank()
        stopped = group._meeting.peers.pids[2]
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            error = error_of(lambda: (dist.all_reduce(torch.ones(3)), dist.barrier()), 5)
            assert re.search("rank [01] failed first", str(error))
            return
        time.sleep(0.1)
        try:
            error = error_of(lambda: dist.all_reduce(torch.ones(3)), 2)
            if isinstance(error, CollectiveTimeoutError):
                assert f"missing is rank 2 (process {stopped}, stopped by a signal)" in str(error)
            else:  # the other rank's time was over first
                assert "rank 2" in str(error)
            error = error_of(lambda: dist.recv(torch.ones(3), 2), 1)
            assert "rank 2" in str(error)
        finally:
            time.sleep(0.5)
            os.kill(stopped, signal.SIGCONT)

    ranks(3, body, connected=False)


def stop_in_each(cases: Sequence[tuple[str, int]]) -> None:
    """For each operation and rank, stop the rank in a group of its own that waits 0.5 s."""
    world = join()
    rank, pids = dist.get_rank(), world._meeting.peers.pids
    for name, stopped in cases:
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        dist.barrier()
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
            error_of(functools.partial(dist.barrier, group=group), 5)
        else:
            _until(lambda pid=pids[stopped]: _is_stopped(pid))
            try:
                error = error_of(functools.partial(_and_barrier, name, stopped, group), 3)
            finally:
                first = min({0, 1, 2} - {stopped})
                if rank == first:  # the other must have found out by itself, or from this rank
                    time.sleep(0.2)
                    os.kill(pids[stopped], signal.SIGCONT)
            assert f"rank {stopped} (process {pids[stopped]}, stopped" in str(error), (name, error)
        dist.barrier()


def _and_barrier(name: str, stopped: int, group: dist.ProcessGroup) -> None:
    OPERATIONS[name](stopped, group)
    dist.barrier(group=group)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


QUICKLY_STOPPED = [("reduce_scatter", 0), ("scatter", 2), ("recv", 1), ("asynchronous", 0)]


def test_a_rank_stopped_in_an_operation_is_named(ranks: Ranks) -> None:
    ranks(3, stop_in_each, QUICKLY_STOPPED, connected=False)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_each_rank_stopped_in_each_operation_is_named(ranks: Ranks, stopped: int) -> None:
    cases = [(name, stopped) for name in OPERATIONS]
    ranks(3, stop_in_each, cases, connected=False, timeout=120)


def test_a_wait_with_a_bound_can_be_repeated(ranks: Ranks) -> None:
    def body() -> None:
        join()
        tensor = torch.ones(3)
        if dist.get_rank() == 1:
            time.sleep(0.5)
            dist.all_reduce(tensor)
            time.sleep(0.3)
            dist.send(tensor, 0, tag=3)
            dist.barrier()
            return
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with pytest.raises(CollectiveTimeoutError, match="missing is rank 1"):
            work.wait(timedelta(seconds=0.05))
        work.wait()
        receive = dist.irecv(tensor, 1, tag=3)
        assert receive is not None
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            receive.wait(timedelta(seconds=0.01))
        receive.wait()
        assert tensor.tolist() == [2, 2, 2]
        dist.barrier()

    ranks(2, body, connected=False)


def test_errors_reach_futures_and_backward(ranks: Ranks) -> None:
    def body() -> None:
        join()
        rank = dist.get_rank()
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
            work.wait()
        with pytest.raises(Exception, match="rank 1 called"):
            future.wait()
        group = dist.new_group()
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2), process_group=group
        )
        loss = model(torch.ones(1, 2)).sum()
        if rank == 1:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(Exception, match="the ranks differ"):
            loss.backward()

    ranks(2, body, connected=False)


def test_a_rank_that_has_left_is_named(ranks: Ranks) -> None:
    def body() -> None:
        join()
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            time.sleep(0.5)
            return
        error = error_of(dist.barrier, 1)
        assert isinstance(error, RankFailedError)
        assert "rank 1 has destroyed the group" in str(error)

    ranks(2, body, connected=False)


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_left_after_kills(ranks: Ranks, count: int) -> None:
    """No file in /dev/shm, no process, no descriptor or mapping of a segment."""
    before = set(os.listdir("/dev/shm"))

    def body() -> None:
        for turn in range(count):
            _run_and_kill(turn % 2, delay=turn % 7 * 0.003)
        assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
        assert "meshwright-" not in Path("/proc/self/maps").read_text()
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        assert not any("meshwright-" in _target(link) for link in links)

    ranks(1, body, connected=False, timeout=180)
    assert set(os.listdir("/dev/shm")) == before


def _run_and_kill(victim: int, delay: float) -> None:
    """Two processes in a loop of collectives; one is killed, the other must end by itself."""
    directory = tempfile.mkdtemp()
    store = os.path.join(directory, "store")
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                dist.init_process_group(
                    "cpu:meshwright", store=dist.FileStore(store, 2), rank=rank, world_size=2
                )
                Path(directory, str(rank)).touch()
                while True:
                    dist.all_reduce(torch.ones(100))
            except RankFailedError:
                code = 7
            finally:
                os._exit(code)
        children.append(child)
    while len(os.listdir(directory)) < 3:
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(children[victim], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 7)
    shutil.rmtree(directory)


def test_threads_and_descriptors_end_with_the_group(ranks: Ranks) -> None:
    def body() -> None:
        join()

        def counts() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for turn in range(100):
            group = dist.new_group()
            work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
            _wait(work)
            _wait(dist.isend(torch.ones(2), 1 - dist.get_rank(), group=group))
            _wait(dist.irecv(torch.ones(2), 1 - dist.get_rank(), group=group))
            dist.destroy_process_group(group)
            del group, work
            gc.collect()
            if turn == 0:
                first = counts()
        assert counts() == first

    ranks(2, body, connected=False)


def _target(link: Path) -> str:
    return os.readlink(link) if link.is_symlink() else ""


def test_strangers_cannot_map_the_memory(ranks: Ranks) -> None:
    def body() -> None:
        join()
        if dist.get_rank() == 0:
            mine = shared_memory.allocate(dist.group.WORLD, 1000, torch.float32)
            assert mine.numel() == 1000
            links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
            segments = [link for link in links if "meshwright-" in _target(link)]
            assert len(segments) >= 2
            for segment in segments:
                assert segment.stat().st_mode & 0o777 == 0o600
                assert segment.stat().st_uid == os.geteuid()
        dist.barrier()

    ranks(2, body, connected=False)


def test_a_stranger_segment_is_refused() -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, 4096)
    try:
        with pytest.raises(CommunicationError, match="4096 bytes"):
            Segment.open(os.getpid(), descriptor, 8192)
    finally:
        os.close(descriptor)
    with pytest.raises(CommunicationError, match="cannot be opened"):
        Segment.open(os.getpid(), 999, 4096)
