"""The bodies of the check on simulated devices, and what is printed of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu.failures import judge_loss
from gpu.places import Place
from gpu.running import Result, found_by, line_of, perform, summary
from gpu.table import (
    Row,
    Site,
    all_rows,
    rows_alone,
    rows_as_many,
    rows_of_streams,
    rows_together,
)
from gpu.traces import REGION, Span, counted
from gpu.values import collectives, trains
from gpu_check import main, refusal
from meshwright.comm import Communicator, Pending
from meshwright.errors import RankFailedError
from meshwright.testing import Ending, Outcome, Ranks, RanksFailed

ALONE, TOGETHER = Site(kind="simulated", size=1), Site(kind="simulated", size=2)
AS_MANY = Site(kind="simulated", size=1, as_many=True)
HOST = Site(kind="host", size=2)
PROGRAM = Path(__file__).parents[1] / "gpu_check.py"

ELSEWHERE = {
    "transfers to oneself": "Gloo, which moves the bytes of a simulated device, has no such sends",
    "compile": "nothing is compiled under a dispatch mode: on the host below",
}
"""Rows that no simulated device can run."""

AWAITED = ("failure: ",)
"""Rows that the library does not pass on devices of several ranks yet."""


def cases() -> list[object]:
    """The rows for one rank and for two."""
    pairs = [*rows_together(TOGETHER), *rows_of_streams(TOGETHER)]
    rows = [*rows_alone(ALONE), *rows_as_many(AS_MANY)]
    rows += [*(row for row in pairs if not row.name.startswith(AWAITED))]
    return [
        pytest.param(row, id=f"{row.name} on {row.site}")
        for row in rows
        if not any(name in row.name for name in ELSEWHERE)
    ]


@pytest.mark.few(1, slow=40)
@pytest.mark.parametrize("row", cases())
def test_a_row_on_simulated_devices(ranks: Ranks, row: Row) -> None:
    assert found_by(row, ranks)


def without_waits(place: Place, world: Communicator, name: str) -> str:
    """Train where no stream waits for the library's collectives, whose numbers are there."""
    wait = Pending.wait

    def unwaited(pending: Pending, *args: Any, **kwargs: Any) -> Any:
        if pending.communicator.is_on_host or not pending.issued.label:
            return wait(pending, *args, **kwargs)
        assert all(work._job.ended.wait(20.0) for work in pending.works)
        return pending._value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", unwaited)
        return trains(place, world, name)


@pytest.mark.parametrize("name", ["fully_shard", "tensor parallel"])
@pytest.mark.slow
def test_one_rank_as_many_shows_a_missing_wait(ranks: Ranks, name: str) -> None:
    row = Row(name="planted", site=ALONE, body=without_waits, args=(name,))
    assert found_by(row, ranks), "one rank sends nothing"
    with pytest.raises(RanksFailed, match=r"unordered: .* of group 0 on the stream"):
        found_by(replace(row, site=AS_MANY), ranks)


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in rows_together(HOST)
        if "compile" in row.name or row.name.startswith(("pipeline: DualPipeV", "failure", "tr"))
    ],
    ids=lambda row: row.name,
)
@pytest.mark.slow
def test_a_row_on_the_host(ranks: Ranks, row: Row) -> None:
    assert found_by(row, ranks)


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("version", "build", "gpus", "said"),
    [
        (None, None, 0, "expected torch 2.11 or newer, found none"),
        ("2.10.1+cu128", "12.8", 1, "expected torch 2.11 or newer, found 2.10.1+cu128"),
        ("2.13.0+cpu", None, 0, "expected a CUDA build of torch, found 2.13.0+cpu"),
        ("2.11.0+cu130", "13.0", 0, "expected a GPU, found none"),
        ("2.11.0+cu130", "13.0", 1, ""),
        ("3.0.0", "14.0", 8, ""),
    ],
)
def test_what_cannot_be_checked_is_refused(
    version: str | None, build: str | None, gpus: int, said: str
) -> None:
    reason = refusal(version, build, gpus)
    assert reason.startswith(said)
    assert bool(reason) == bool(said)
    assert "\n" not in reason


def test_the_program_refuses_a_machine_without_a_gpu_in_one_line() -> None:
    hidden = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(PROGRAM.parents[1] / "src"),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        env=hidden,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu-check: expected ")
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pydantic" else found(name)
    )
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "gpu-check: expected a python3 that has numpy, safetensors, pydantic, found no pydantic\n"
    )


_BARE = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in {names!r}
        return None if missing else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
sys.path[:0] = {path!r}
import gpu.running
from gpu.table import all_rows
print(len(all_rows()))
"""


@pytest.mark.slow
def test_nothing_but_torch_numpy_safetensors_and_pydantic_is_needed() -> None:
    names = {
        "pytest",
        "_pytest",
        "hypothesis",
        "rich",
        "tyro",
        "cloudpickle",
        "xxhash",
        "transformers",
    }
    path = [str(PROGRAM.parents[1] / "src"), str(PROGRAM.parent)]
    program = _BARE.format(names=names, path=path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


# ---------------------------------------------------------------------------- what is printed


def fails(place: Place, world: Communicator) -> str:
    raise ValueError("as planned")


def one_row(site: Site) -> Row:
    return Row(name="collectives", site=site, body=collectives)


def test_what_fails_is_printed_with_its_first_line_and_counted() -> None:
    bad = replace(one_row(Site(kind="host", size=1)), body=fails)
    good = one_row(Site(kind="host", size=1))
    failed, passed = perform([bad, good])
    assert failed.state == "failed"
    assert failed.found.startswith("1 of 1 ranks failed")
    assert "ValueError: as planned" in failed.details
    assert "6 kinds in 5 dtypes" in line_of(passed)
    assert summary([failed, passed]) == "1 passed, 1 failed"


def test_rows_have_names_of_their_own() -> None:
    names = [(row.name, row.site) for row in all_rows()]
    assert len(set(names)) == len(names)


def test_host_stops_and_launches_are_counted_inside_of_the_region() -> None:
    spans = [
        Span("cudaDeviceSynchronize", 0, 5),
        Span(REGION, 10, 20),
        Span("cudaLaunchKernelExC", 11, 12),
        Span("cudaMemcpyAsync", 13, 14),
        Span("cudaStreamSynchronize", 15, 16),
        Span("cudaEventQuery", 16, 17),
        Span("cudaStreamSynchronize", 19, 21),
    ]
    counts = counted(spans)
    assert (counts.launches, counts.stops) == (2, ["cudaStreamSynchronize"])
    with pytest.raises(ValueError, match="expected a range"):
        counted(spans[:1])


def outcome(rank: int, ending: Ending, error: BaseException | None, seconds: float) -> Outcome:
    return Outcome(
        rank=rank, ending=ending, exception=error, seconds=seconds, order=rank, exit_code=1
    )


def test_a_loss_is_judged_by_what_the_others_say() -> None:
    lost = outcome(1, Ending.DIED, None, 3.0)
    named = outcome(0, Ending.RAISED, RankFailedError("rank 1 died", 1), 4.0)
    assert "named on 1 other ranks" in judge_loss(RanksFailed([named, lost]), kind="kill")
    for bad in (
        outcome(0, Ending.HUNG, None, 4.0),
        outcome(0, Ending.RAISED, RuntimeError("rank 1 of NCCL"), 4.0),
        outcome(0, Ending.RAISED, RankFailedError("rank 2 died", 2), 4.0),
        outcome(0, Ending.RAISED, RankFailedError("rank 1 died", 1), 400.0),
    ):
        with pytest.raises(AssertionError):
            judge_loss(RanksFailed([bad, lost]), kind="kill")


def test_a_result_is_one_line() -> None:
    result = Result(row=one_row(ALONE), state="passed", seconds=1.25, found="all")
    assert line_of(result).split() == ["collectives", "simulated", "x", "1", "passed", "1.2", "all"]
