"""Ranks started by `launch`: their environment, their failures, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.errors import LaunchError, RankFailedError
from support.internals.comm import first_failure, launch, record_failure

RANK = """
import os, sys, time
from pathlib import Path
from meshwright.comm.failures.membership import record_failure
folder, mode = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
(folder / f"{rank}.pid").write_text(str(os.getpid()))
(folder / f"{rank}.env").write_text(
    " ".join(os.environ[n] for n in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"))
)
if mode == "raise" and rank == "1":
    try:
        raise ValueError("no such file\\nof tokens")
    except ValueError as error:
        record_failure(error)
        raise
if mode == "kill" and rank == "0":
    os.kill(os.getpid(), 9)
if mode in ("raise", "kill", "wait"):
    time.sleep(60)
"""


def _run(folder: Path, mode: str) -> int:
    script = folder / "rank.py"
    script.write_text(RANK)
    return launch([sys.executable, str(script), str(folder), mode], 2)


def _alive(folder: Path) -> list[int]:
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_ranks_get_torchruns_variables_and_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _run(tmp_path, "well") == 0
    assert [(tmp_path / f"{rank}.env").read_text() for rank in range(2)] == ["2 0 1", "2 1 1"]
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raise", "rank 1 of 2 exited with status 1: ValueError: no such file of tokens"),
        pytest.param("kill", "rank 0 of 2 was ended by signal 9 (SIGKILL)", marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_is_named_and_nobody_is_left(
    tmp_path: Path, mode: str, message: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        _run(tmp_path, mode)
    assert str(caught.value) == message
    assert _alive(tmp_path) == []


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot start '/no/such/program'"):
        launch(["/no/such/program"], 2)


@pytest.mark.slow
def test_a_signal_reaches_the_ranks_and_is_the_result(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script), str(tmp_path), "wait"]
    program = f"""
from meshwright.comm.groups.launch import launch
raise SystemExit(launch({command!r}, 2))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.env"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said and "death signal" not in said
    assert _alive(tmp_path) == []


def _failure(rank: int, folder: Path, exit_code: int, said: str, second: int) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if said:
        text = {"message": {"message": said, "extraInfo": {"timestamp": str(second)}}}
        file.write_text(json.dumps(text))
    return ProcessFailure(local_rank=rank, pid=rank, exitcode=exit_code, error_file=str(file))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        (
            [(1, "RankFailedError: rank 1 failed first"), (1, "ValueError: no")],
            "rank 1 of 2 exited with status 1: ValueError: no",
        ),
        (
            [(-15, "ValueError: no"), (1, "RankFailedError: rank 0 failed first")],
            "rank 0 of 2 failed: ValueError: no",
        ),
        ([(-15, ""), (-9, "")], "rank 1 of 2 was ended by signal 9 (SIGKILL)"),
        (
            [(-9, ""), (1, "CollectiveTimeoutError: rank 0 does not answer")],
            "rank 1 of 2 exited with status 1: CollectiveTimeoutError: rank 0 does not answer",
        ),
    ],
)
def test_who_followed_is_not_named(tmp_path: Path, ends: list[tuple[int, str]], first: str) -> None:
    failures = {
        rank: _failure(rank, tmp_path, code, said, 100 + rank)
        for rank, (code, said) in enumerate(ends)
    }
    assert first_failure(failures, len(ends)) == first


def test_torchruns_error_file_names_the_culprit_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who followed is dated later than who failed: torchrun takes the earliest for the first."""
    told: list[tuple[int, str]] = []
    errors = (RankFailedError("rank 1 failed first: ValueError: no", 1), ValueError("no"))
    for rank, error in enumerate(errors):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        record_failure(error)  # never raised, as where the command line handles it
        message = json.loads(file.read_text())["message"]
        assert type(error).__name__ in message["extraInfo"]["py_callstack"]
        assert "NoneType: None" not in file.read_text()
        failure = ProcessFailure(local_rank=rank, pid=rank, exitcode=1, error_file=str(file))
        told.append((failure.timestamp, str(failure.message)))
    assert "ValueError: no" in min(told)[1]
    assert "failed first" not in min(told)[1]


FAILS = """
import sys
import torch
import meshwright as mw
world = mw.connect()
if world.rank == 0 and sys.argv[1] == "one":
    raise ValueError("the cause")
layer = torch.nn.Linear(2, 2)
with torch.no_grad():
    layer.weight.fill_(world.rank)
mw.fully_shard(layer)(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mode", "cause", "follower"),
    [
        ("one", "ValueError: the cause", "RankFailedError: rank 0 failed first"),
        ("all", "to have the same values on all ranks", "raised the same CollectiveMismatchError"),
    ],
)
@pytest.mark.parametrize("shows", ["brief", "full"])
def test_ranks_print_the_cause_of_a_failure_and_no_frames_of_libraries(
    tmp_path: Path, mode: str, cause: str, follower: str, shows: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "MESHWRIGHT_TRACEBACK": shows},
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    said = "\n".join(lines)
    assert cause in said
    if shows == "full":
        assert 'torch/nn/modules/module.py"' in said
        return
    assert len(lines) <= 25
    assert sum(line.partition("]: ")[2].startswith("meshwright.errors.") for line in lines) <= 2
    assert follower in said
    assert 'torch/nn/modules/module.py"' not in said
    assert "MESHWRIGHT_TRACEBACK=full" in said
    if mode == "all":
        assert said.count(cause) == 1
    # The launcher's own summary has a line of each rank, and no frames of libraries either.
    assert 'torch/nn/modules/module.py"' not in done.stderr
