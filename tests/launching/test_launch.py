"""Functions that scripts and notebooks run on several ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm import communicator, connect
from meshwright.errors import LaunchError, RankFailedError


def test_each_rank_returns_what_it_has(capfd: pytest.CaptureFixture[str]) -> None:
    factor = torch.arange(3.0)

    def body(start: float, *, scale: float) -> tuple[int, torch.Tensor]:
        world = connect()
        total = world.all_reduce(factor * (start + world.rank)).wait()
        print("here is", world.rank)
        os.write(2, b"no end of line")
        assert total is not None
        return world.size, total * scale

    found = mw.launch(body, 2, 1.0, scale=2.0)
    assert [size for size, _ in found] == [2, 2]
    assert all(torch.equal(value, factor * 6) for _, value in found)
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == sorted(
        line
        for rank in (0, 1)
        for line in (f"[rank {rank}] here is {rank}", f"[rank {rank}] no end of line")
    )


def test_the_first_failure_is_named_with_its_traceback_and_the_others_end() -> None:
    def fail_on_one() -> None:
        world = connect()
        if world.rank == 1:
            raise KeyError("no such token")
        world.barrier()

    with pytest.raises(RankFailedError, match="rank 1 was first: it raised KeyError") as caught:
        mw.launch(fail_on_one, 2)
    assert caught.value.rank == 1
    assert "in fail_on_one" in str(caught.value)
    assert "no such token" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.slow
def test_a_limit_ends_the_ranks_and_shows_where_they_are(tmp_path: Path) -> None:
    def stand_still() -> None:
        (tmp_path / str(communicator().rank)).write_text(str(os.getpid()))
        if communicator().rank == 0:
            time.sleep(60)

    with pytest.raises(RankFailedError, match="rank 0 was first: it hung") as caught:
        mw.launch(stand_still, 2, timeout=8.0)
    assert "in stand_still" in str(caught.value)
    assert not any(map(is_there, tmp_path.iterdir()))


def is_there(file: Path) -> bool:
    return Path("/proc", file.read_text()).exists()


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import meshwright as mw
from meshwright.comm import communicator

def work(folder, rounds=60):
    number = communicator().rank
    part = folder / f"{number}.part"
    part.write_text(str(os.getpid()))
    part.rename(folder / str(number))
    for _ in range(rounds):
        time.sleep(1)

folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs behind them ignore it
try:
    mw.launch(work, 2, folder)
except KeyboardInterrupt:
    print("interrupted", [Path("/proc", f.read_text()).exists() for f in folder.iterdir()])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_an_interrupt_or_the_end_of_the_program_leaves_nobody(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A function of ``__main__``; after Ctrl-C nobody is left as soon as the call has ended."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "ranks"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 240
    while len([f for f in folder.iterdir() if not f.suffix]) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert said == "interrupted [False, False]\n"
    until = time.monotonic() + 60
    while any(map(is_there, folder.iterdir())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_there, folder.iterdir()))


def test_long_output_is_not_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """Each part goes to the caller while the rank runs, and its memory back."""

    def talk() -> tuple[int, int]:
        for _ in range(20):
            print("x" * 2**20)
        until = time.monotonic() + 60
        while os.fstat(1).st_blocks * 512 > 2**20 and time.monotonic() < until:
            time.sleep(0.05)
        return os.fstat(1).st_size, os.fstat(1).st_blocks * 512

    ((size, held),) = mw.launch(talk, 1)
    assert size > 20 * 2**20 > 20 * held
    assert capfd.readouterr().out.count("x" * 2**20) == 20


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="cannot be sent between this process and its ranks"):
        mw.launch(print, 1, (number for number in range(3)))
    with pytest.raises(ValueError, match="at least 1 rank, found 0"):
        mw.launch(print, 0)
    for variables in (
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
        {"PET_NODE_RANK": "1", "PET_NNODES": "4"},
    ):
        with monkeypatch.context() as launcher:
            for name, text in variables.items():
                launcher.setenv(name, text)
            with pytest.raises(LaunchError, match="a launcher has started this process as one"):
                mw.launch(print, 2)


def test_a_function_that_connects_by_itself() -> None:
    assert mw.launch(lambda: connect("gloo").backend, 1, connected=False) == ["gloo"]
