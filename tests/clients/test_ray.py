"""Ray Train itself, with workers on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import communicator
from meshwright.data import DataLoader
from meshwright.errors import RankFailedError
from support.clients import needs, whole

needs("ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


WRAPPERS = {"replicate": mw.replicate, "fully_shard": mw.fully_shard}


def weights(
    folder: Path, workers: int | tuple[int, int], epochs: int, stop_at: int, wrapper: str
) -> Any:
    """What the loop has at the end; with ``stop_at`` a worker ends the first time it is there."""
    from support.internals.integrations import ray

    def loop(config: Mapping[str, object]) -> None:
        world = communicator()
        draw = torch.Generator().manual_seed(3)
        inputs = torch.randn(64, 8, generator=draw, dtype=torch.float64)
        loader: Any = DataLoader(
            [(x, x.sum().view(1)) for x in inputs], 16, data_rank=world.rank, data_size=world.size
        )
        torch.manual_seed(0)
        model = WRAPPERS[wrapper](torch.nn.Linear(8, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        # A folder for each attempt: Ray may not have kept the last report of one that failed.
        attempt = world.broadcast(torch.tensor(time.time_ns())).wait()
        with ray.latest_checkpoint() as kept:
            if kept is not None:
                checkpoint.load(kept, model=model, optimizer=optimizer, data=loader)
        while loader.epoch < epochs:
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            path = checkpoint.save(
                folder / "checkpoints" / str(int(attempt)),
                loader.epoch,
                model=model,
                optimizer=optimizer,
                data=loader,
            )
            ray.report({"weights": whole(model)["weight"].flatten().tolist()}, path)
            lost = folder / "lost"
            if loader.epoch == stop_at and world.rank == world.size - 1 and not lost.exists():
                lost.touch()
                raise RuntimeError("a worker is lost")

    made = ray.trainer(loop, workers, storage=folder / "ray", name="run", failures=1)
    found = made.fit()
    return found.metrics["weights"]


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on this machine, whose workers find the modules that this process finds."""
    # Its processes start slowly where the cores are busy.
    os.environ |= {
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    }
    import ray

    paths = os.pathsep.join(filter(None, sys.path))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(
    ("wrapper", "workers"),
    [pytest.param("replicate", 2, id="fixed"), pytest.param("fully_shard", (1, 2), id="elastic")],
)
def test_workers_that_are_lost_and_come_back_train_as_one_process(
    tmp_path: Path, wrapper: str, workers: int | tuple[int, int]
) -> None:
    alone = weights(tmp_path / "alone", 1, 4, 0, wrapper)
    found = weights(tmp_path / "lost", workers, 4, 2, wrapper)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone))


@pytest.mark.usefixtures("ray_here")
def test_a_worker_that_is_killed_ends_the_run_and_is_named(tmp_path: Path) -> None:
    from support.internals.integrations import ray

    def loop(config: Mapping[str, object]) -> None:
        world = communicator()
        model = mw.replicate(torch.nn.Linear(8, 1))
        for step in range(10_000):
            if step == 3 and world.rank == 1:
                (tmp_path / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                model(torch.ones(8)).sum().backward()
            except RankFailedError as error:
                (tmp_path / "named").write_text(f"{time.time()} {error}")
                raise

    with pytest.raises(Exception, match=r"(?i)rank 1") as failed:
        ray.trainer(loop, 2, storage=tmp_path / "ray", name="run").fit()
    assert type(failed.value).__name__ == "WorkerGroupError"
    killed = float((tmp_path / "killed").read_text())
    assert time.time() - killed < 60.0
    when, _, text = (tmp_path / "named").read_text().partition(" ")
    assert text.startswith("rank 1 failed first") and float(when) - killed < 10.0


@pytest.mark.usefixtures("ray_here")
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    """Two workers end after two epochs; one, begun anew from what Ray has kept, trains the rest."""
    alone = weights(tmp_path / "alone", 1, 4, 0, "fully_shard")
    weights(tmp_path / "resized", 2, 2, 0, "fully_shard")
    found = weights(tmp_path / "resized", 1, 4, 0, "fully_shard")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone))
