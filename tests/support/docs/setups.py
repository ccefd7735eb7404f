"""What the code of each page finds there, and what is to hold when it has run.

A setup is given the names of a page before its code runs; what follows its ``yield`` runs behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import meshwright
from meshwright.comm import communicator, connect
from meshwright.pipelining import PipelineStage, Schedule1F1B
from support.expert_parallel.samples import Block, Fused
from support.internals.integrations import Tracker
from support.internals.sampling import Sampler

Setup = Callable[[dict[str, Any]], Iterator[None]]


def checkpoints(names: dict[str, Any]) -> Iterator[None]:
    Path("config.json").write_text("{}")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names |= {"model": model, "optimizer": optimizer, "folder": "torchs"}
    names["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    names |= {"sampler": Sampler(64, 8, seed=1), "step": 120}
    yield
    assert (names["step"], names["best"]) == (120, 0.25)
    assert Path("for-others/config.json").exists()


def compiled(names: dict[str, Any]) -> Iterator[None]:
    connect()
    names["Net"] = lambda: nn.Linear(2, 2)
    yield
    assert names["model"].weight.shape == (2, 2)


def concepts(names: dict[str, Any]) -> Iterator[None]:
    parts = [
        SimpleNamespace(
            inputs=torch.ones(2, 4), numbers_in_the_global_batch=range(first, first + 2)
        )
        for first in (0, 2)
    ]
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    names |= {"torch": torch, "meshwright": meshwright, "parts": parts, "steps": 2}
    names |= {"model": model, "loss": torch.sum}
    yield
    assert model[0].weight.grad is not None
    assert issubclass(names["Lion"], torch.optim.Optimizer)


def data(names: dict[str, Any]) -> Iterator[None]:
    seen: list[tuple[int, ...]] = []

    def model(**batch: Tensor) -> SimpleNamespace:
        seen.append(tuple(batch["labels"].shape))
        return SimpleNamespace(loss=0.0)

    names |= {"dataset": list(range(100)), "model": model, "lengths": [5000] * 60}
    names["documents"] = [list(range(5000)) for _ in names["lengths"]]
    yield
    assert names["state"] == {"seed": 1, "epoch": 3, "position": 20, "size": 100}
    assert seen == [(64, 4096)] * 2


def notebooks(names: dict[str, Any]) -> Iterator[None]:
    yield
    assert len(names["losses"]) == 2
    assert max(names["losses"]) < 0.01


def pipelines(names: dict[str, Any]) -> Iterator[None]:
    yield
    world, loss = communicator(), names["found"].loss.item()
    assert loss < 1.0
    if world.rank == world.size - 1:
        # The plan's pipeline and the own loop took the same steps.
        own = nn.functional.mse_loss(names["output"], names["y"]).item()
        assert abs(own - loss) < 1e-4
        assert len(names["losses"]) == 8


def reports(names: dict[str, Any]) -> Iterator[None]:
    world = connect()
    stage = PipelineStage(nn.Linear(2, 2), world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.MSELoss())

    def step(x: Tensor, target: Tensor) -> None:
        kwargs = {"target": target} if stage.is_last else {}
        schedule.step(*((x,) if stage.is_first else ()), **kwargs)

    names |= {"schedule": SimpleNamespace(step=step), "x": torch.ones(4, 2), "y": torch.ones(4, 2)}
    names["train"] = lambda steps: communicator().barrier()
    yield
    assert isinstance(names["Tracker"](), Tracker)
    mine = names["timer"].timeline(world.rank).events
    assert len(names["timeline"].events) > len(mine) > 0
    world.barrier()
    if world.rank == 0:
        assert {"step.html", "step.json"} <= {file.name for file in Path().iterdir()}


def tensor_parallel(names: dict[str, Any]) -> Iterator[None]:
    connect()
    mlp = nn.Sequential()
    mlp.add_module("up", nn.Linear(4, 8))
    mlp.add_module("down", nn.Linear(8, 4))
    layer = nn.Module()
    layer.add_module("mlp", mlp)
    model = nn.Module()
    model.add_module("layers", nn.ModuleList([layer]))
    names["model"] = model
    yield
    assert mlp.up.weight.to_local().shape == (4, 4)
    assert len(names["optimizer"].param_groups[0]["params"]) == 4


def expert_parallel(names: dict[str, Any]) -> Iterator[None]:
    connect()
    model = nn.Module()
    model.add_module("layers", nn.ModuleList([Block(Fused(4), 2), Block(Fused(3), 1)]))
    names["model"] = model
    yield
    first, last = (layer.experts.down_proj for layer in model.layers)
    assert first.to_local().shape[0] == 2
    assert last.shape[0] == 3
    assert len(names["optimizer"].param_groups[0]["params"]) == 16


def nothing(names: dict[str, Any]) -> Iterator[None]:
    yield


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        f"docs/{setup.__name__}.md": setup
        for setup in (
            *(checkpoints, compiled, concepts, data, expert_parallel, notebooks),
            *(pipelines, reports, tensor_parallel),
        )
    }
)
