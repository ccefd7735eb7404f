"""Microbatches with all rows of a batch: outputs have the bits of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import PipelineStage, ScheduleGPipe
from meshwright.testing import Ranks, masked_microbatches, unmasked


def test_each_has_its_rows_and_zeros() -> None:
    batch = {"x": torch.arange(1.0, 11).view(5, 2), "n": 3}
    first, second, third = masked_microbatches(batch, 3)
    assert first["x"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0], [0, 0]]
    assert second["x"].tolist() == [[0, 0], [0, 0], [5, 6], [7, 8], [0, 0]]
    assert third["x"][:4].count_nonzero() == 0
    assert [part["n"] for part in (first, second, third)] == [3, 3, 3]
    joined = unmasked([first, second, third])
    assert torch.equal(joined["x"], batch["x"])
    with pytest.raises(ValueError, match="the rows of the whole batch in every microbatch, found"):
        unmasked([torch.ones(3), torch.ones(2)])


def body() -> None:
    world = communicator()
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(2)]
    x = torch.randn(37, 96)
    stage = PipelineStage(parts[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 5)
    whole = masked_microbatches(x, 5)
    schedule.step_microbatches(None if world.rank else [(part,) for part in whole])
    if world.rank:
        assert torch.equal(unmasked(stage.output_chunks), nn.Sequential(*parts)(x))


def test_a_pipeline_has_the_bits_of_one_process(ranks: Ranks) -> None:
    ranks(2, body)
