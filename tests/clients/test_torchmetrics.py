"""Metrics of torchmetrics over two ranks, on our groups, equal to those of one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.clients import needs

needs("torchmetrics")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def measured(rank: int, size: int, group: object = None) -> dict[str, torch.Tensor]:
    import torchmetrics

    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 4, (30,), generator=draw)
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(4, process_group=group),
            "area": torchmetrics.classification.MulticlassAUROC(4, process_group=group),
            "mean": torchmetrics.MeanMetric(process_group=group),
        },
        compute_groups=False,
    )
    for part in torch.arange(30).split(7):  # uneven over the ranks
        mine = part[rank::size]
        metrics["accuracy"].update(scores[mine], targets[mine])
        metrics["area"].update(scores[mine].softmax(-1), targets[mine])
        metrics["mean"].update(scores[mine])
    return {name: metric.compute() for name, metric in metrics.items()}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_metrics_are_those_of_one_process(ranks: Ranks, backend: str) -> None:
    def body() -> dict[str, torch.Tensor]:
        world = communicator()
        return measured(world.rank, world.size, world.group)

    expected = measured(0, 1)
    for found in ranks(2, body, backend=backend, timeout=300):
        torch.testing.assert_close(found, expected)
