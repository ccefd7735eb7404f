"""Submitit's local executor: tasks on this machine in the place of SLURM's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from support.clients import adam, alone, assert_same, model, needs, rows, whole

needs("submitit")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_two_tasks_train_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import submitit

    def task() -> dict[str, torch.Tensor]:
        from meshwright.comm import connect, disconnect

        submitit.helpers.TorchDistributedEnvironment().export()
        world = connect()
        assert world.size == 2
        found = mw.replicate(model())
        optimizer, (inputs, targets) = adam(found.parameters()), rows().tensors
        for step in range(4):
            mine = slice(8 * step + world.rank, 8 * step + 8, 2)
            optimizer.zero_grad()
            F.mse_loss(found(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        disconnect()
        return whole(found)

    # The tasks find the modules that this process finds.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    assert_same(executor.submit(task).results(), alone())
