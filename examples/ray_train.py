"""The loop of replicate.py on workers of Ray Train, which may come back in another number.

::

    python examples/ray_train.py FOLDER

FOLDER is one that all machines of the cluster see.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import communicator
from meshwright.data import DataLoader
from meshwright.integrations import ray


def loop(config: Mapping[str, object]) -> None:
    """Train from where the newest checkpoint that Ray knows is."""
    world = communicator()  # Ray has made its group, and the trainer has connected
    inputs = torch.randn(256, 8, generator=torch.Generator())
    loader: DataLoader[list[torch.Tensor]] = DataLoader(
        [(x, x.sum().view(1)) for x in inputs], 32, data_rank=world.rank, data_size=world.size
    )
    model = mw.replicate(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A folder for each attempt: Ray may not have kept the last report of one that failed.
    started = torch.tensor(time.time_ns())
    world.broadcast(started).wait()
    attempt = int(started)
    with ray.latest_checkpoint() as kept:
        if kept is not None:
            checkpoint.load(kept, model=model, optimizer=optimizer, data=loader)
    while loader.epoch < cast("int", config["epochs"]):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        path = checkpoint.save(
            Path(cast("str", config["folder"])) / str(attempt),
            loader.epoch,
            model=model,
            optimizer=optimizer,
            data=loader,
            keep_last=2,
        )
        ray.report({"loss": loss.item(), "epoch": loader.epoch}, path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/ray_train.py FOLDER")
    folder = sys.argv[1]
    found = ray.trainer(
        loop,
        (1, 2),
        config={"epochs": 20, "folder": f"{folder}/checkpoints"},
        storage=f"{folder}/ray",
        failures=2,
    ).fit()
    print(found.metrics)
