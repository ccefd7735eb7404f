"""One job at a time saves to a folder; its claim ends with it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import Storage, claim, latest, load_tensors, release, save_tensors
from meshwright.comm import communicator
from meshwright.errors import (
    CheckpointClaimedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointWriteError,
)
from meshwright.testing import Ranks
from support.checkpoint.jobs import Job, job, outcome, tensors, until, whole_steps
from support.internals.checkpoint import FOLDERS, GRACE, Claim, Holder

Tell = Callable[[object], None]


def saves_and_stays(folder: Path) -> Callable[[Tell], None]:
    """A job that saves once and goes on with something else."""

    def body(tell: Tell) -> None:
        tell(outcome(folder, 1))
        time.sleep(60)

    return body


def saves(folder: Path, step: int = 2) -> Callable[[Tell], None]:
    def body(tell: Tell) -> None:
        tell(outcome(folder, step))

    return body


# ------------------------------------------------------------------ two jobs


def body_race(folder: Path, signs: Path) -> list[str]:
    """One of several jobs that save to one folder, step after step, as fast as they can."""
    rank = int(os.environ["RANK"])
    (signs / f"ready {rank}").touch()
    until(lambda: len(list(signs.glob("ready *"))) == 4)
    found = [outcome(folder, 4 * step + rank) for step in range(20)]
    (signs / f"done {rank}").touch()
    until(lambda: len(list(signs.glob("done *"))) == 4)  # a holder holds until it ends
    return [str(os.getpid()), *found]


@pytest.mark.slow
def test_of_jobs_that_race_one_saves_and_the_others_are_refused_by_name(
    ranks: Ranks, tmp_path: Path
) -> None:
    """80 saves of four jobs."""
    folder, signs = tmp_path / "run", tmp_path / "signs"
    signs.mkdir()
    results = ranks(4, body_race, folder, signs, connected=False)
    (winner,) = [result for result in results if not result[1]]
    assert winner[1:] == [""] * 20
    for result in results:
        if result is not winner:
            for text in result[1:]:
                assert text.startswith("CheckpointClaimedError: ")
                assert f"{folder} belongs to process {winner[0]} on host " in text
                assert "; use one folder for each job" in text
    assert len(whole_steps(folder)) == 3
    assert sorted(path.name[:5] for path in folder.iterdir()) == ["step_"] * 3


def test_the_second_is_refused_at_once_though_the_first_does_not_save(tmp_path: Path) -> None:
    with job(saves_and_stays(tmp_path)) as first:
        assert first.told() == ""
        text = outcome(tmp_path, 2)
        assert f"belongs to process {first.pid} on host {os.uname().nodename}" in text
        assert re.search(r"running since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(.*python", text)
        with pytest.raises(CheckpointClaimedError, match=f"belongs to process {first.pid} "):
            claim(tmp_path)
        with pytest.raises(CheckpointClaimedError, match=f"belongs to process {first.pid} "):
            claim(tmp_path / ".." / tmp_path.name)
    assert outcome(tmp_path, 2) == ""
    assert whole_steps(tmp_path) == [1, 2]


def test_a_job_that_ends_or_gives_the_folder_back_leaves_it_to_others(tmp_path: Path) -> None:
    with job(saves(tmp_path, 1)) as first:
        assert first.told() == ""
        assert first.join() == 0
    claim(tmp_path)
    assert outcome(tmp_path, 2) == ""
    assert (tmp_path / ".claim").exists()
    release(tmp_path)
    assert not (tmp_path / ".claim").exists()
    with job(saves(tmp_path, 3)) as other:
        assert other.told() == ""
    assert whole_steps(tmp_path) == [1, 2, 3]


# ------------------------------------------------------------------ ends of holders


@pytest.mark.parametrize("joins", [False, True])
def test_kill_9_and_a_restart_at_once(tmp_path: Path, joins: bool) -> None:
    def body(step: int) -> Callable[[Tell], None]:
        def run(tell: Tell) -> None:
            if joins:
                claim(tmp_path)
            tell(outcome(tmp_path, step))
            threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            torch.ones(20_000_000)
            time.sleep(60)

        return run

    jobs = [Job(body(0))]
    for step in range(1, 15):
        assert jobs[-1].told() == ""
        jobs[-1].kill()
        jobs.append(Job(body(step)))  # nobody has waited for the one before
    assert jobs[-1].told() == ""
    jobs[-1].kill()
    assert [each.join() for each in jobs] == [-9] * 15
    assert whole_steps(tmp_path) == [12, 13, 14]


def test_a_lock_that_comes_back_while_its_holder_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has waited for a process that ends longer than for a guest has not used up that time."""
    gone = Holder(pid=2**22, place=Holder.of_process(os.getpid()).place)
    assert gone.is_ending
    free_at, take = time.monotonic() + 3 * GRACE, Claim.take
    unknown = iter([Holder(pid=0)])

    def taken(claim: Claim, *, stays: bool) -> Holder | None:
        if time.monotonic() < free_at:
            return gone
        return next(unknown, None) or take(claim, stays=stays)

    monkeypatch.setattr(Claim, "take", taken)
    claim(tmp_path)
    release(tmp_path)
    assert next(unknown, None) is None


def test_processes_that_a_killed_job_has_started_do_not_keep_its_claim(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        assert outcome(tmp_path, 1) == ""
        claim(tmp_path)
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
        started = subprocess.Popen(["sleep", "60"], close_fds=False)
        tell([forked, started.pid])
        time.sleep(60)

    with job(body) as first:
        orphans = first.told()
        assert isinstance(orphans, list)
        first.kill()
        try:
            assert outcome(tmp_path, 2) == ""
            for pid in orphans:
                os.kill(pid, 0)
        finally:
            for pid in orphans:
                os.kill(pid, 9)
    assert whole_steps(tmp_path) == [1, 2]


def test_a_worker_that_was_forked_during_a_save_does_not_keep_the_folder(tmp_path: Path) -> None:
    forked: list[Job] = []

    class Forking(Storage):
        def create(self, path: Path) -> int:
            forked.append(Job(lambda tell: time.sleep(60)))
            return super().create(path)

    def body(tell: Tell) -> None:
        save_tensors(tmp_path, tensors(1), {}, step=1, storage=Forking())
        tell([each.pid for each in forked])
        time.sleep(60)

    with job(body) as first:
        pids = first.told()
        assert isinstance(pids, list)
        first.kill()
        try:
            assert outcome(tmp_path, 2) == ""
        finally:
            for pid in pids:
                os.kill(pid, 9)


def test_a_stopped_holder_still_holds(tmp_path: Path) -> None:
    with job(saves_and_stays(tmp_path)) as first:
        assert first.told() == ""
        os.kill(first.pid, 19)
        assert f"belongs to process {first.pid} " in outcome(tmp_path, 2)


# ------------------------------------------------------------------ one process, one family


def test_a_second_thread_is_refused_while_one_saves(tmp_path: Path) -> None:
    found: list[str] = []

    class Slow(Storage):
        def create(self, path: Path) -> int:
            if path.name == "manifest.json":
                thread = threading.Thread(target=lambda: found.append(outcome(tmp_path, 7)))
                thread.start()
                thread.join()
            return super().create(path)

    save_tensors(tmp_path, tensors(1), {}, step=1, storage=Slow())
    assert "is being saved to by another thread of this process" in found[0]
    assert outcome(tmp_path, 2) == ""
    assert whole_steps(tmp_path) == [1, 2]


def test_what_a_process_has_saved_the_processes_that_it_starts_go_on_with(tmp_path: Path) -> None:
    assert outcome(tmp_path, 1) == ""

    def body(tell: Tell) -> None:
        claim(tmp_path)
        tell(outcome(tmp_path, 2))
        time.sleep(60)

    with job(body) as child:
        assert child.told() == ""
        assert f"belongs to process {child.pid} " in outcome(tmp_path, 3)
        with job(saves(tmp_path, 4)) as other:
            assert f"belongs to process {child.pid} " in str(other.told())
    assert outcome(tmp_path, 3) == ""
    assert whole_steps(tmp_path) == [1, 2, 3]


def test_many_folders_do_not_use_up_the_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(FOLDERS + 40):
        assert outcome(tmp_path / str(number), 1) == ""
    assert len(os.listdir("/proc/self/fd")) <= before + FOLDERS
    for number in range(FOLDERS + 40):
        release(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) <= before


# ------------------------------------------------------------------ the folder and its file


def test_a_folder_that_was_removed_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim(folder)
    assert outcome(folder, 1) == ""
    shutil.rmtree(folder)
    assert outcome(folder, 1) == ""
    with job(saves(folder)) as other:
        assert f"belongs to process {os.getpid()} " in str(other.told())
    release(folder)


def test_who_was_given_up_on_by_hand_notices(tmp_path: Path) -> None:
    """The file was removed, as the error of another host advises, but its holder was not gone."""
    claim(tmp_path)
    (tmp_path / ".claim").unlink()

    def body(tell: Tell) -> None:
        claim(tmp_path)
        tell("")
        time.sleep(60)

    with job(body) as other:
        assert other.told() == ""
        assert f"belongs to process {other.pid} " in outcome(tmp_path, 1)
    release(tmp_path)


def test_a_claim_of_another_host_says_what_can_be_done(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        """Hold the file's lock alone, as this host sees the claim of another one."""
        handle = os.open(tmp_path / ".claim", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX)
        record = {"pid": 12, "host": "elsewhere", "place": "elsewhere/1/2", "run": "my-run"}
        os.write(handle, json.dumps(record).encode())
        tell("")
        time.sleep(60)

    with job(body) as other:
        other.told()
        text = outcome(tmp_path, 1)
        assert "belongs to process 12 of run my-run on host elsewhere: one job at a time" in text
        assert "where elsewhere is gone, the file server gives its lock back after a while" in text
        assert f"otherwise remove {tmp_path / '.claim'}" in text
    assert outcome(tmp_path, 1) == ""


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    text = outcome(tmp_path, 1)
    assert f"{tmp_path / '.claim'}: No locks available" in text
    assert "mount it with locks" in text
    with pytest.raises(CheckpointWriteError, match="mount it with locks"):
        claim(tmp_path)


# ------------------------------------------------------------------ readers


def test_readers_see_whole_checkpoints_while_a_job_saves_and_removes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome(tmp_path, 0, keep_last=1) == ""

    def body(tell: Tell) -> None:
        for step in range(1, 30):
            assert outcome(tmp_path, step, keep_last=1) == ""
        tell("")

    seen: set[int] = set()
    with job(body) as writer:
        while 29 not in seen:
            newest = latest(tmp_path)
            assert newest is not None
            try:
                found = load_tensors(newest)
            except CheckpointDamagedError:
                raise
            except CheckpointError as error:
                assert re.search("was removed while it was read|no readable checkpoint", str(error))
                continue
            assert torch.equal(found.tensors["t3"], tensors(found.step)["t3"])
            seen.add(found.step)
        assert writer.told() == ""
    assert len(seen) > 3
    assert caplog.text == "", "nothing was damaged or left by an interrupted save"


# ------------------------------------------------------------------ ranks


def body_refused(folder: Path) -> str:
    group = communicator()
    with pytest.raises(CheckpointClaimedError) as first:
        claim(folder, communicator=group)
    with pytest.raises(CheckpointClaimedError) as second:
        save_tensors(folder, tensors(2) if group.rank == 0 else {}, {}, step=2, communicator=group)
    assert "was not saved (prepare): rank 0: " in str(second.value)
    return str(first.value)


def body_holds(folder: Path) -> tuple[int, str]:
    """The ranks of a job hold a folder; another rank for itself is another job."""
    group = communicator()
    save_tensors(folder, tensors(3) if group.rank == 0 else {}, {}, step=3, communicator=group)
    group.barrier()
    text = outcome(folder, 4) if group.rank == 1 else ""
    group.barrier()
    save_tensors(folder, tensors(5) if group.rank == 1 else {}, {}, step=5, communicator=group)
    assert (folder / ".claim").exists()
    return os.getpid(), text


@pytest.mark.slow
def test_all_ranks_are_refused_alike_and_others_by_them(ranks: Ranks, tmp_path: Path) -> None:
    with job(saves_and_stays(tmp_path)) as first:
        assert first.told() == ""
        texts = ranks(2, body_refused, tmp_path)
        assert len(set(texts)) == 1
        assert f"belongs to process {first.pid} on host " in texts[0]
    (pid, _), (_, text) = ranks(2, body_holds, tmp_path)
    assert f"belongs to process {pid} " in text
    assert whole_steps(tmp_path) == [1, 3, 5]
    assert not (tmp_path / ".claim").exists(), "who leaves the run gives its claim back"


SCRIPT = """
import os, signal, sys, torch
from meshwright.checkpoint import save_tensors
from meshwright.comm import connect
world, attempt = connect(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
workers = torch.utils.data.DataLoader(range(10**6), num_workers=1)
batch = iter(workers)
next(batch)
for step in range(3 * attempt, 3 * attempt + 3):
    tensors = {"t": torch.ones(3)} if world.rank == 0 else {}
    save_tensors(sys.argv[1], tensors, {}, step=step, communicator=world, keep_last=2)
if attempt < 2 and world.rank == attempt:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_next_attempts_of_torchrun_save_at_once(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *words, "--max-restarts=2", str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CheckpointClaimedError" not in done.stderr
    steps = sorted(load_tensors(path).step for path in (tmp_path / "run").glob("step_*"))
    assert steps == [7, 8]
