"""Submitit's local executor: tasks on this machine in the place of SLURM's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

submitit = pytest.importorskip("submitit", reason="submitit is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_two_tasks_are_two_ranks(tmp_path: Path) -> None:
    def task() -> tuple[int, int, float]:
        from meshwright.comm import connect, disconnect

        submitit.helpers.TorchDistributedEnvironment().export()
        world = connect()
        total = world.all_reduce(torch.tensor(float(world.rank + 1))).wait()
        assert total is not None
        disconnect()
        return world.rank, world.size, total.item()

    executor = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    assert sorted(executor.submit(task).results()) == [(0, 2, 3.0), (1, 2, 3.0)]
