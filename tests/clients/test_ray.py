"""Ray Train itself, with workers on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import communicator
from meshwright.data import DataLoader

train = pytest.importorskip("ray.train", reason="ray[train] is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def weights(folder: Path, workers: int | tuple[int, int], epochs: int, stop_at: int) -> Any:
    """What the loop has at the end; with ``stop_at`` a worker ends the first time it is there."""
    from meshwright.integrations import ray

    def loop(config: Mapping[str, object]) -> None:
        world = communicator()
        draw = torch.Generator().manual_seed(3)
        inputs = torch.randn(64, 8, generator=draw, dtype=torch.float64)
        loader: Any = DataLoader(
            [(x, x.sum().view(1)) for x in inputs], 16, data_rank=world.rank, data_size=world.size
        )
        torch.manual_seed(0)
        model = mw.replicate(torch.nn.Linear(8, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ray.latest_checkpoint() as kept:
            if kept is not None:
                saved = checkpoint.load(kept)
                model.load_state_dict(saved.tensors)
                loader.load_state_dict(saved.metadata["loader"])
        while loader.epoch < epochs:
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            path = checkpoint.save(
                folder / "checkpoints",
                dict(model.state_dict()),
                {"loader": loader.state_dict()},
                step=loader.epoch,
                communicator=world,
            )
            ray.report({"weights": model.weight.flatten().tolist()}, path)
            lost = folder / "lost"
            if loader.epoch == stop_at and world.rank == world.size - 1 and not lost.exists():
                lost.touch()
                raise RuntimeError("a worker is lost")

    found = ray.trainer(loop, workers, storage=folder / "ray", failures=1).fit()
    return found.metrics["weights"]


def test_two_workers_that_are_lost_and_come_back_train_as_one_process(tmp_path: Path) -> None:
    import ray

    ray.init(num_cpus=4)
    try:
        alone = weights(tmp_path / "alone", 1, 4, 0)
        for name, workers in (("fixed", 2), ("elastic", (1, 2))):
            found = weights(tmp_path / name, workers, 4, 2)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(alone))
    finally:
        ray.shutdown()
