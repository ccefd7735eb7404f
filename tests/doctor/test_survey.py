from __future__ import annotations

import os

import pytest
import torch

from meshwright.doctor import Finding, examine, memory_limit, report_lines, usable_cores
from support.internals.doctor import collectives as doctor_collectives


def test_facts_of_this_machine() -> None:
    found = {finding.name: finding for finding in examine(measure_collectives=False)}
    assert found["torch"].value == torch.__version__
    assert {"meshwright", "python", "devices", "backends", "cores", "memory"} <= found.keys()
    assert {"shared memory", "open files", "name localhost", "loopback port"} <= found.keys()
    assert not any(finding.is_broken for finding in found.values())


def test_every_problem_comes_with_a_remedy() -> None:
    for finding in examine(measure_collectives=False):
        assert bool(finding.problem) == bool(finding.remedy)


@pytest.mark.slow
def test_collectives_are_measured_between_two_ranks() -> None:
    found = {finding.name: finding for finding in doctor_collectives.measure()}
    assert list(found) == ["all_reduce 4 KB", "all_reduce 1 MB", "barrier"]
    assert all(" us (median, 2 ranks, meshwright)" in finding.value for finding in found.values())
    assert not any(finding.is_broken for finding in found.values())


def test_report_names_problem_and_remedy() -> None:
    fine = Finding(name="cores", value="2")
    broken = Finding(
        name="loopback port", value="none", problem="no", remedy="mend it", is_broken=True
    )
    advice = Finding(name="memory", value="1 GiB", problem="low", remedy="end other programs")
    assert report_lines([fine])[-1] == "Everything needed for training is in place."
    lines = report_lines([fine, broken, advice])
    assert lines[0] == "cores          2"
    assert lines[-2:] == [
        "broken: loopback port: no; mend it",
        "advice: memory: low; end other programs",
    ]


def test_too_many_threads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "512")
    found = {finding.name: finding for finding in examine(measure_collectives=False)}
    assert "divided by the ranks" in found["OMP_NUM_THREADS"].remedy
    assert not found["OMP_NUM_THREADS"].is_broken


def test_limits_are_positive() -> None:
    assert 0 < usable_cores() <= len(os.sched_getaffinity(0))
    available, source = memory_limit()
    assert available > 0
    assert source
